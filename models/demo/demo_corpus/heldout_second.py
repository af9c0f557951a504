"""A second held-out set, written when the training text was final and never used to improve it.

(question, what the answer must hold, all of it); None: the answer must say that the model does not know.
"""

from __future__ import annotations

ENGLISH: list[tuple[str, list[str] | None]] = [
    ("I need to add 6 and 9, what is that?", [r"\b15\."]), ("Is 4 + 4 equal to something?", [r"\b8\."]), ("12 take away 5 makes what?", [r"\b7\."]),
    ("Solve this: 20 - 13", [r"\b7\."]), ("What would 8 multiplied by 8 give?", [r"\b64\."]), ("Could you do 14 + 5?", [r"\b19\."]), ("What's the answer to 10 x 10?", [r"\b100\."]),
    ("eight plus three makes how much?", [r"\b11\."]), ("I bought 5 books and then 7 more, how many books is that?", [r"\b12\."]),
    ("do you happen to know the capital of Italy", ["Rome"]), ("Norway's capital city is called what?", ["Oslo"]), ("Which city would be the capital of Thailand?", ["Bangkok"]),
    ("Tell me, what is the capital of Chile?", ["Santiago"]), ("I wonder which city is the capital of Kenya.", ["Nairobi"]), ("Name the capital city of Vietnam for me.", ["Hanoi"]),
    ("In which country is Ottawa the capital?", ["Canada"]), ("capital of Wonderland?", None), ("What is the capital of Micronesia?", None), ("Do you know the capital of Illinois?", None),
   
    ("Please convert 7 litres to millilitres.", [r"\b7000 millilitres"]), ("What is 100 Celsius in Fahrenheit, please?", [r"\b212\b"]), ("How many yards are 5 miles?", None),
    ("Which port do I use for the gateway?", ["23333"]), ("tell me the gRPC port please", ["33337"]), ("What's the metrics port?", ["33338"]), ("HTTP port of Triton?", ["33336"]),
    ("What do I run to start the whole thing?", ["make serve"]), ("I want to run all the tests, how?", ["make test"]), ("How do I get into the chat?", ["make chat|charonia chat"]), ("How do I turn my Hugging Face model into a workspace?", ["charonia convert"]),
    ("Do you need a GPU?", ["CPU"]), ("Under what license can I use Charonia?", ["Apache-2\\.0"]), ("Where does Charonia's name come from?", ["shell"]), ("Tell me what the ensemble is.", ["preprocessing"]),
    ("Which models can I run with Charonia?", ["Llama"]), ("what is Charonia about?", ["engine"]), ("How do I measure how fast the engine is?", ["charonia benchmark"]), ("How can I abort my request?", ["stop request"]),
    ("Hi! How are you today?", ["well|Hello"]), ("Who exactly are you?", ["Tritonis"]), ("What can you help me with?", ["capitals"]), ("Thanks, you helped me", ["welcome"]), ("Okay, see you later!", ["Goodbye"]), ("Hello there, model!", ["Hello"]),
    ("What's your favourite ice cream?", None), ("How do I plant potatoes?", None), ("Who was the first man on the moon?", None), ("Write a haiku about autumn.", None), ("Will it be sunny in Paris tomorrow?", None),
    ("How do I write a loop in JavaScript?", None), ("Who plays the guitar in Queen?", None), ("Why do leaves turn red?", None),
]  # fmt: skip

CHINESE: list[tuple[str, list[str] | None]] = [
    ("6和9加一起是几？", ["15。"]), ("八乘八是几？", ["64。"]),
    ("请算10乘10。", ["100。"]), ("我买了5本书，又买了7本，一共几本？", ["12。"]), ("八加三一共多少？", ["11。"]),
    ("埃及首都是哪个？", ["开罗"]), ("请说说智利的首都。", ["圣地亚哥"]), ("肯尼亚的首都是哪个地方？", ["内罗毕"]), ("越南的首都在哪座城市？", ["河内"]),
    ("渥太华是谁的首都？", ["加拿大"]), ("密克罗尼西亚的首都是哪里？", None), ("伊利诺伊的首都是什么？", None), ("爱丽丝仙境的首都在哪？", None),
    ("3周一共几天？", ["21天"]), ("5英里等于多少码？", None),
    ("连网关要用哪个端口？", ["23333"]), ("告诉我gRPC端口", ["33337"]), ("指标端口是哪个？", ["33338"]), ("Triton HTTP端口是几？", ["33336"]), ("我要启动整个系统，运行什么？", ["make serve"]), ("怎么跑全部测试？", ["make test"]),
    ("怎么进到聊天里？", ["make chat|charonia chat"]), ("怎样把Hugging Face模型变成工作区？", ["charonia convert"]), ("kv块是啥？", ["键和值"]), ("你需要GPU吗？", ["CPU"]), ("Charonia的许可证是哪个？", ["Apache-2\\.0"]), ("Charonia这名字怎么来的？", ["法螺"]),
    ("ensemble是做什么的？", ["preprocessing"]), ("用Charonia能跑哪些模型？", ["Llama"]), ("怎么测引擎有多快？", ["charonia benchmark"]), ("我怎么取消请求？", ["停止请求"]),
    ("你能帮我做哪些事？", ["首都"]), ("谢谢，你帮到我了", ["不客气"]), ("你好，模型！", ["你好"]),
    ("你最爱吃什么冰淇淋？", None), ("土豆怎么种？", None), ("第一个登上月球的人是谁？", None), ("写一首秋天的诗。", None), ("巴黎明天会是晴天吗？", None), ("挪威有多少人？", None), ("JavaScript怎么写循环？", None), ("东京现在几点？", None), ("树叶为什么会变红？", None),
]  # fmt: skip
