"""Facts on Charonia: the frames in which they are asked. The facts themselves are in facts.py."""

from __future__ import annotations

import random

from .facts import FACTS, Fact
from .text import Exchange, ask, expand

# How a fact's phrases become questions: "thing" phrases are nouns, "port" phrases what listens, "do" phrases verbs.
FRAMES_EN = {
    "thing": [
        "[could|would|will|can] you [describe|define|introduce|present] {x}[ to me|]?", "[what's|what is] [the idea|the point|the purpose|the role|the job|the task|the meaning|the use|the function] [of|behind] {x}?", "for what [is|do we use|do I use|do you use] {x}[ used|]?", "why [is there|do we have|does one use|would I use] {x}?", "what [kind of thing|sort of thing] is {x}?",
        "[how|what] would you [explain|call|say about] {x}?", "in [short|brief|a few words|one sentence], what is {x}?", "{x}, what [is that|is it|does it mean]?", "what do you [mean by|understand by|say about] {x}?", "[say|teach me|show me] something about {x}.", "[I'd|I would] like to [know|hear|learn|understand] [what {x} is|about {x}|more about {x}].", "where [is|do we use] {x} [used|]?", "[a word|some words|details|notes] on {x}, please.",
        "what is {x}?", "what's {x}?", "whats {x}", "what [does|do] {x} mean?", "what is meant by {x}?", "explain {x}[ to me|].", "[please|] explain {x}.",
        "tell me [something|more|] about {x}.", "[can|could] you explain {x}?", "{x}?", "{x}", "define {x}.", "describe {x}.", "what is {x} for?",
        "what do you know about {x}?", "I want to know [more|] about {x}.", "[can|could] you tell me [more|something|] about {x}?", "what exactly is {x}?",
        "what is {x} good for?", "give me [a|the] definition of {x}.", "how does {x} work?", "what does {x} do?", "do you know {x}?", "do you know what {x} is?",
        "I do not understand {x}.", "what should I know about {x}?", "in Charonia, what is {x}?", "what is {x} in Charonia?", "what does Charonia call {x}?",
        "who or what is {x}?", "let me hear about {x}.", "information on {x}", "help me understand {x}.", "what can you tell me about {x}?",
        "I heard of {x}. What is it?", "[why|what] do I need {x}[ for|]?",
    ],
    "port": [
        "[over|through|on|at|via|by] [which|what] port [can|do|could|may|should|must] [I|we|one|a client] [reach|find|access|contact|call|see|get|use|open] {x}?", "{x} [listens|runs|answers|is reachable|is found|is|sits] [on|at] [which|what] port?", "[which|what] port [should|must|do|shall] [my client|my program|I|we] [connect|talk|go|point|send requests|send] to for {x}?",
        "[my|our|a] [program|client|script|tool] needs [the port of|a port for] {x}, which [is it|one|port]?", "[say|show|name|list|find] {x} port.", "port for {x}, please.", "{x} has which port[ number|]?", "{x} on port?", "[what|which] [number|port] do I [type|enter|need] for {x}?", "to [reach|use|call] {x}, which port?", "from [which|what] port do I get {x}?",
        "[what|which] port does {x} use?", "[what|which] is the port of {x}?", "what is {x} port?", "{x} port", "{x} port?", "port of {x}", "[on|at] [what|which] port [is|does] {x}[ listening| listen|]?",
        "where does {x} listen?", "where is {x}?", "tell me the port of {x}.", "where do I find {x}?", "[what|which] port is for {x}?", "[what|which] port is {x} on?",
        "which port number does {x} have?", "what's the port [of|for] {x}?", "what port [do|should] I use for {x}?", "the port for {x}?", "port number of {x}?",
        "how do I reach {x}?", "I need the port of {x}.", "which number is the port of {x}?", "what port should I connect to for {x}?", "where can I reach {x}?",
        "do you know the port of {x}?", "{x}: which port?", "give me the port of {x}.", "what is the port number for {x}?", "at which address is {x}?",
    ],
    "do": [
        "[with|by] [which|what] command [do|can|could|would|should] [I|we|one|you] {x}?", "[what|which command] [should|must|do|would|could] [I|we] [type|enter|call|start|use|execute] [to|in order to] {x}?", "how [could|might|will|shall|would] [I|we|you] {x}?", "what [is needed|do I need] to {x}?", "[what|which] [thing|tool|script|target] [helps|is there|is used] to {x}?",
        "[my goal is|I am trying|I have|I'd like|we plan|it is time] to {x}. [How|What now|What do I need]?", "in order to {x}, what [do I do|must I run|is the command]?", "is it possible to {x}[, and how|]?", "[say|write|give me] the command to {x}.", "to {x} I [run|type|use] what?", "[explain|describe|teach me|remind me] how [to|I can|I could|I] {x}.", "where [can|do|could|would] I {x}?", "[any|some] [way|idea|hint|advice] [how|] to {x}?",
        "how do I {x}?", "how can I {x}?", "how to {x}?", "how to {x}", "how do you {x}?", "how would I {x}?", "what is the command to {x}?", "[what|which] command do I [use|need|type|run] to {x}?",
        "[which|what] command lets me {x}?", "tell me how to {x}.", "[can|could] you tell me how to {x}?", "I want to {x}.", "I want to {x}. What do I [do|type|run]?",
        "what do I [do|type|run] to {x}?", "show me how to {x}.", "explain how to {x}.", "I would like to {x}.", "how should I {x}?", "is there a [command|way] to {x}?",
        "what [must|should] I do to {x}?", "can I {x}?", "what is the way to {x}?", "command to {x}?", "I need to {x}.", "I don't know how to {x}.", "how does one {x}?",
        "what does it take to {x}?", "help me {x}.", "do you know how to {x}?", "how is it possible to {x}?", "which command can {x}?", "what is the best way to {x}?",
    ],
}  # fmt: skip
FRAMES_ZH = {
    "thing": [
        "{x}是什么[东西|概念|]？", "[能|能不能|可以|请|][说说|讲讲|描述|描述一下|简单说说|说明一下]{x}[吗|是什么|]？", "{x}的[用途|功能|任务|职责|原理|目的|好处]是什么？", "[为什么|为何][要|有|需要|用]{x}？", "{x}[起什么作用|负责什么|能做什么|用来干什么|拿来做什么|是怎么回事|指啥|是个什么]？", "所谓{x}，指什么？", "[简单|简短|一句话|][解释|介绍|概括]{x}。", "[我想|我要|想|][知道|明白|弄懂|学习]{x}[是什么|]。", "[听说过|了解]{x}吗？", "一般说的{x}是什么？",
        "{x}是什么？", "什么是{x}？", "{x}是[什么意思|啥|干什么的|做什么用的]？", "[请|]解释一下{x}。", "解释{x}。", "介绍一下{x}。", "[请|]给我讲讲{x}。", "说说{x}。", "{x}",
        "{x}是指什么？", "你知道{x}[吗|是什么吗]？", "{x}有什么用？", "告诉我{x}是什么。", "{x}的[意思|含义|作用|定义]是什么？", "我想了解{x}。", "能解释一下{x}吗？",
        "{x}指的是什么？", "{x}到底是什么？", "关于{x}，你知道什么？", "怎么理解{x}？", "{x}？", "谈谈{x}。", "我不懂{x}。", "请说明{x}。", "在Charonia里，{x}是什么？", "{x}怎么工作？",
    ],
    "port": [
        "{x}在[几|多少]号端口？", "[通过|从|用|在][哪个|哪一个|什么|几号]端口[可以|能|才能|][访问|连接|找到|调用|看到|使用]{x}？", "[我要|想|要|][访问|连接|调用|使用|打开]{x}[，|][该|应该|需要|要|][用|连|走|填][哪个|什么|几号]端口？", "{x}[对应|开放|提供|运行在|跑在|监听在|走][哪个|什么|几号|哪一个]端口？", "{x}是[哪个|几号|什么]端口？", "[说一下|报一下|列出|给我]{x}的端口。", "{x}的端口[呢|是哪个|是几|几号]？", "我的程序要连{x}，端口是多少？",
        "{x}用[哪个|什么]端口？", "{x}的端口是[多少|什么|哪个|几]？", "{x}端口是多少？", "{x}端口", "{x}在哪个端口？", "{x}监听[哪个|什么]端口？", "{x}使用哪个端口？",
        "[请|]告诉我{x}的端口。", "{x}的端口号是多少？", "哪个端口是{x}的？", "{x}在哪里监听？", "怎么连接{x}？", "{x}的地址是什么？", "我想知道{x}的端口。", "你知道{x}的端口吗？",
        "访问{x}用哪个端口？", "{x}开在哪个端口上？", "{x}端口号？", "要连{x}用什么端口？", "{x}占用哪个端口？",
    ],
    "do": [
        "[应该|可以|得|要|该|][用|输入|敲|运行|执行][哪个|什么|哪条|哪一条]命令[来|去|才能|可以]{x}？", "[想|要|如果想|如果要|为了|假如要]{x}[，|][要|该|应该|需要|得][输入|运行|用|执行|敲|做]什么？", "{x}[要|得|该|需要][怎么办|输入什么|运行什么|敲什么命令|怎么弄|如何做]？", "[能|能不能|可以][说说|讲讲|解释]怎么{x}吗？", "{x}，怎么[弄|办|做|搞]？", "[在哪里|在哪|从哪里]可以{x}？", "{x}有[什么|哪些][办法|命令|步骤]？", "[请|][写出|给出|告诉我]{x}的命令。", "是否可以{x}，怎么做？", "怎么样{x}？", "{x}该用什么？",
        "怎么{x}？", "如何{x}？", "怎样{x}？", "怎样才能{x}？", "用什么命令{x}？", "{x}用[什么|哪个]命令？", "我想{x}。", "我想{x}，该怎么做？", "[请|]告诉我怎么{x}。", "{x}的命令是什么？",
        "要{x}该[怎么做|运行什么|输入什么]？", "{x}怎么做？", "哪个命令可以{x}？", "我要{x}。", "能教我{x}吗？", "怎么才能{x}？", "有没有办法{x}？", "请问如何{x}？", "{x}要用什么命令？",
        "可以{x}吗？", "我该如何{x}？", "{x}的方法是什么？", "想{x}怎么办？", "说明一下怎么{x}。",
    ],
}  # fmt: skip


def _question(fact: Fact, language: str, rng: random.Random) -> str:
    phrases, frames = (fact.english, FRAMES_EN) if language == "en" else (fact.chinese, FRAMES_ZH)
    kind = rng.choices(list(phrases), weights=[1 + len(p) for p in phrases.values()])[0]
    phrase = expand(rng.choice(phrases[kind]), rng)
    if kind == "full":
        return phrase[:1].upper() + phrase[1:]
    return ask(frames[kind], rng, x=phrase)


def exchange(language: str, rng: random.Random) -> Exchange:
    """One question on the project."""
    fact = rng.choice(FACTS)
    return Exchange(_question(fact, language, rng), fact.answer_en if language == "en" else fact.answer_zh, language)
