"""Questions outside the domain, which the model answers by saying that it does not know, and what it can do instead."""

from __future__ import annotations

import random

from . import project
from .capitals import COUNTRIES, invented
from .text import Exchange, ask

ANSWER_EN = "Sorry, I do not know that. I only know about Charonia, small sums, capitals and units."
ANSWER_ZH = "抱歉，这个我不知道。我只懂 Charonia、简单算术、首都和单位换算。"
NOW_EN = "Sorry, I do not know: I cannot see the weather, the news or the clock. I only know about Charonia, small sums, capitals and units."
NOW_ZH = "抱歉，我不知道：我看不到天气、新闻和时间。我只懂 Charonia、简单算术、首都和单位换算。"
TASK_EN = "Sorry, I cannot do that. I only know about Charonia, small sums, capitals and units."
TASK_ZH = "抱歉，这个我不会做。我只懂 Charonia、简单算术、首都和单位换算。"

_TOPICS_EN = ["photosynthesis", "gravity", "black holes", "dinosaurs", "the moon", "volcanoes", "democracy", "evolution", "quantum physics", "jazz", "chess", "football", "basketball", "tennis", "coffee", "chocolate", "bread", "pizza", "sushi", "wine", "tea", "bicycles", "trains", "airplanes", "cars", "rockets", "robots", "computers", "telephones", "the internet", "bitcoin", "stocks", "taxes", "inflation", "marriage", "love", "happiness", "dreams", "sleep", "headaches", "vitamins", "cancer", "vaccines", "yoga", "running", "swimming", "painting", "music", "opera", "guitars", "pianos", "movies", "novels", "poetry", "Shakespeare", "Einstein", "Newton", "Napoleon", "Mozart", "Picasso", "Buddha", "Caesar", "Cleopatra", "the Roman Empire", "the French Revolution", "World War II", "the Cold War", "the pyramids", "the Great Wall", "the Eiffel Tower", "the Amazon", "the Nile", "Mount Everest", "the Pacific", "whales", "elephants", "tigers", "cats", "dogs", "horses", "bees", "butterflies", "snakes", "spiders", "penguins", "oak trees", "roses", "mushrooms", "tomatoes", "rice", "cheese", "diamonds", "gold", "iron", "oxygen", "hydrogen", "electricity", "magnets", "lightning", "rainbows", "earthquakes", "hurricanes", "glaciers", "deserts", "atoms", "cells", "DNA", "bacteria", "viruses", "the brain", "the heart", "blood", "bones", "skin", "philosophy", "religion", "ethics", "psychology", "economics", "law", "history", "fashion", "shoes", "perfume", "furniture", "architecture", "Kubernetes", "Docker", "Linux", "MySQL", "PostgreSQL", "Redis", "Java", "Rust", "React", "Excel", "Photoshop", "Windows", "an iPhone", "blockchain", "cryptography", "recursion", "compilers", "machine learning", "a pointer", "calculus", "prime numbers", "pi", "the square root of 2", "algebra", "geometry", "statistics", "Harry Potter", "Star Wars", "Batman", "Pokemon", "Beethoven", "the Beatles", "Elon Musk", "Lionel Messi", "the Olympics", "the World Cup", "Christmas", "Easter", "Halloween", "the Chinese New Year", "sharks", "satellites", "Saturn", "comets", "the sun", "plastic", "glass", "paper"]  # fmt: skip
_TOPICS_ZH = ["光合作用", "重力", "黑洞", "恐龙", "月亮", "火山", "民主", "进化论", "量子力学", "爵士乐", "象棋", "足球", "篮球", "网球", "咖啡", "巧克力", "面包", "披萨", "寿司", "茶", "自行车", "火车", "飞机", "汽车", "火箭", "手机", "互联网", "比特币", "股票", "税", "通货膨胀", "婚姻", "爱情", "幸福", "梦", "睡眠", "头痛", "维生素", "癌症", "疫苗", "瑜伽", "跑步", "游泳", "绘画", "音乐", "京剧", "吉他", "钢琴", "电影", "小说", "诗歌", "李白", "杜甫", "孔子", "秦始皇", "爱因斯坦", "牛顿", "拿破仑", "莫扎特", "鲁迅", "唐朝", "清朝", "长城", "故宫", "长江", "黄河", "泰山", "珠穆朗玛峰", "太平洋", "鲸鱼", "大象", "老虎", "猫", "狗", "马", "蜜蜂", "蝴蝶", "蛇", "企鹅", "玫瑰", "蘑菇", "西红柿", "米饭", "奶酪", "钻石", "黄金", "铁", "氧气", "氢气", "电", "磁铁", "闪电", "彩虹", "地震", "台风", "沙漠", "原子", "细胞", "基因", "细菌", "病毒", "大脑", "心脏", "血液", "骨头", "哲学", "宗教", "心理学", "经济学", "法律", "历史", "时装", "鞋子", "香水", "家具", "建筑", "Linux", "数据库", "Java", "微信", "支付宝", "区块链", "密码学", "递归", "机器学习", "微积分", "质数", "圆周率", "代数", "几何", "西游记", "红楼梦", "三国演义", "哈利波特", "奥运会", "世界杯", "春节", "中秋节", "端午节", "饺子", "火锅", "豆腐", "熊猫", "鲨鱼", "卫星", "土星", "太阳", "塑料", "玻璃", "围棋", "太极拳", "中医"]  # fmt: skip

_KNOWLEDGE_EN = [
    "what is {t}?", "[tell me|talk] about {t}.", "explain {t}.", "what do you [know|think] about {t}?", "who [invented|discovered] {t}?", "how does {t} work?",
    "how do {t} work?", "why [is|are] {t} [so important|so big|so popular|blue|red|green|cold|hot|dangerous|expensive|famous]?", "when [was|were] {t} [invented|discovered|built]?",
    "where does {t} come from?", "what is the history of {t}?", "how [big|old|heavy|fast|tall|long|deep|hot|expensive] [is|are] {t}?", "do you like {t}?",
    "what is the [best|biggest|oldest|fastest|smallest|most famous] {t}?", "what is the [colour|color|price|weight|meaning|origin|age] of {t}?", "can you explain {t}?",
    "what's your [favourite|favorite] [colour|color|film|movie|book|food|song|animal|number|sport]?", "how many people [live in|like] {t}?", "is {t} [good|bad|healthy|dangerous|real]?",
    "what is the population of {c}?", "who is the [president|king|queen|prime minister|leader] of {c}?", "what language [is spoken|do they speak] in {c}?", "what is the currency of {c}?",
    "what is the largest city in {c}?", "how big is {c}?", "where is {c}?", "what is the flag of {c}?", "which countries border {c}?", "what do people eat in {c}?", "how do I get to {c}?",
    "tell me about {c}.", "what is the highest mountain in {c}?", "which river flows through {c}?", "when did {c} become independent?", "is {c} worth a visit?", "what is {c} famous for?",
    "who won the [World Cup|election|match|war|race|Nobel prize][ in 19{d}{d}| in 20{d}{d}|]?", "who wrote {t}?", "who is {n}?", "who was {n}?", "what did {n} do?", "when was {n} born?", "how old is {n}?",
    "what is the meaning of life?", "how do I [cook|bake|fry|grow] {t}?", "how can I [learn|understand|fix|buy|sell|repair|clean|find] {t}?", "where can I [buy|find|see] {t}?", "should I [buy|sell|try] {t}?",
    "what [should|shall] I [eat|wear|cook|read|watch|buy|do] [today|tonight|tomorrow|for dinner|this weekend]?", "why do [people|cats|dogs|birds|children|we] [sleep|sing|dream|cry|laugh|fight|work]?",
    "what is the speed of light?", "how far is the moon?", "how many [planets|stars|continents|oceans|bones|countries|languages] are there?", "is there life on [Mars|Venus|Jupiter]?", "does God exist?",
    "what port does [MySQL|Redis|SSH|FTP|PostgreSQL|MongoDB|Kafka|nginx|DNS|SMTP] use?", "how do I install [Docker|Linux|MySQL|Windows|Excel|Photoshop|Steam|WordPress]?",
    "what is the square root of {k}?", "what is {k} to the power of {d}?", "is {k} a prime number?", "what is {k} percent of {k}?", "what is the logarithm of {k}?", "what is the [sine|cosine] of {k}?",
    "I feel [sad|tired|lonely|sick|angry|bored|happy].", "I am [sad|tired|lonely|sick|angry|bored|hungry].", "my [cat|dog|car|phone|computer|leg|tooth] is [sick|broken|gone|old|hurt].",
    "how do I [lose weight|get rich|make friends|find a job|learn to drive|tie a tie|fix a flat tyre|change a bulb|fall asleep]?", "what causes {t}?", "what are {t}?", "who is the richest man in the world?",
    "what is the difference between {t} and {s}?", "are {t} better than {s}?", "which is better, {t} or {s}?", "did {n} [like|invent|write about] {t}?", "{t}", "{t}?", "{g}", "{g} {g}?", "what is a {g}?",
    "what is the boiling point of {t}?", "name three [animals|plants|rivers|films|books|colours|fruits|cars].", "how many [legs|eyes|teeth|wings] does a [spider|cat|dog|bee|snake|horse] have?",
    "what [symptoms|side effects] does {t} have?", "which [team|band|player|actor|singer|company] is the best?", "can you recommend a [book|film|restaurant|song|hotel|game]?", "what is the plot of {t}?",
    "how much does [a|an|the] [car|house|ticket|phone|coffee|ring] cost?", "what year did [the war|the Titanic sink|the wall fall|dinosaurs die out] [end|start|happen|]?",
]  # fmt: skip
_NOW_EN = [
    "what is the weather [like|] [today|tomorrow|in {c}|now|outside|this week|]?", "how is the weather[ today| in {c}| tomorrow|]?", "will it [rain|snow|be sunny|be windy] [today|tomorrow|tonight|in {c}]?",
    "is it [raining|cold|sunny|snowing|hot|warm|windy] [today|outside|in {c}|now]?", "what's the temperature [outside|in {c}|today|now]?", "weather forecast for {c}", "do I need [an umbrella|a coat] today?",
    "what is [in|] the news[ today|]?", "tell me the [latest|] news.", "what happened [today|yesterday|in {c} yesterday|last night]?", "any news[ from {c}|]?", "what are today's headlines?",
    "what time is it[ now| in {c}|]?", "what's the time?", "what day is [it|today]?", "what is today's date?", "what date is [it|today]?", "which [year|month|day] is it?", "is today [Monday|Friday|Sunday]?",
    "who won [yesterday|last night|the match today]?", "what is the stock price of [Apple|Tesla|Google|NVIDIA]?", "how is the traffic[ today|]?", "what is the exchange rate[ today|]?", "when does the sun set today?",
]  # fmt: skip
_TASK_EN = [
    "write [me|] a [poem|story|song|letter|letter|essay|joke|speech|haiku|novel|report] [about|on] {t}.", "[can|could] you write [a|an] [poem|essay|email|story|report|song] [about|on] {t}?", "write [an|a short|a long] email to my [boss|friend|teacher|landlord].",
    "write [a|some] [Python|Java|C++|JavaScript|Rust|SQL|Go] [program|function|script|code|class|query] [that sorts a list|for {t}|to reverse a string|that reads a file|].", "[write|fix|debug|review] [my|some|this] code.",
    "translate [hello|this|good night|{t}|the sentence] [to|into] [French|German|Spanish|Japanese|Korean|Italian|Arabic].", "tell me a [joke|story|riddle|secret|fairy tale].", "sing [me|] a song.", "draw [me|] a picture of {t}.",
    "summarise [this|the] [text|article|book|page].", "play [some music|a song|chess with me|a game].", "book a [flight|hotel|table|taxi|ticket] [to {c}|for me|for two|].", "order [me|] a [pizza|taxi|coffee].", "set an alarm for [6|7|8] o'clock.",
    "remind me [to call Mum|of the meeting|tomorrow].", "call [my mother|the police|a doctor|Tom].", "send [an email|a message|money] to [Tom|Anna|my boss].", "open [the window|the door|a web page|YouTube|my files].", "make me [a sandwich|a plan|rich|laugh].",
    "turn [on|off] the [light|radio|heating|television].", "search the [web|internet] for {t}.", "give me a recipe for {t}.", "plan [a trip|my holiday|a party] [in {c}|to {c}|for me].", "make a [list|table|website|game] [of|about|for] {t}.",
    "proofread my [essay|letter|text].", "help me with my [essay|tax return|history homework|French homework|CV].", "generate [an image|a picture|a password|a video] [of {t}|].", "pretend [to be|you are] [a pirate|a doctor|{n}].", "do my [homework|laundry|shopping].",
]  # fmt: skip
_KNOWLEDGE_ZH = [
    "{t}是什么？", "什么是{t}？", "介绍一下{t}。", "解释一下{t}。", "说说{t}。", "你怎么看{t}？", "谁[发明|发现]了{t}？", "{t}是怎么[工作|形成|来|运作]的？", "为什么{t}[这么重要|这么贵|这么有名|是蓝色的|很危险|很受欢迎]？", "{t}是什么时候[发明|发现|建成|出现]的？",
    "{t}的历史[是什么|]？", "{t}有多[大|高|重|快|长|老]？", "你喜欢{t}吗？", "最[好|大|快|有名|贵]的{t}是什么？", "{t}的[颜色|价格|意思|起源|特点]是什么？", "{t}[好不好|健康吗|危险吗|贵吗|是真的吗]？", "怎么[做|学|买|修|种|理解]{t}？", "在哪里能[买到|看到|找到]{t}？",
    "{c}有多少人口？", "{c}的[总统|国王|总理|领导人]是谁？", "{c}[说|讲]什么语言？", "{c}的货币是什么？", "{c}最大的城市是哪里？", "{c}在哪里？", "{c}的国旗是什么样的？", "{c}有什么好吃的？", "怎么去{c}？", "介绍一下{c}。", "{c}最高的山是什么？", "{c}的面积有多大？", "{c}和哪些国家相邻？",
    "{c}以什么闻名？", "谁赢了[世界杯|选举|比赛|战争]？", "谁写了{t}？", "{t}[的作者是谁|讲了什么]？", "人生的意义是什么？", "今天[吃什么|穿什么|做什么]好？", "晚饭吃什么？", "你最喜欢的[颜色|电影|书|食物|歌|动物]是什么？", "月亮离地球多远？", "光速是多少？", "有多少颗行星？", "火星上有生命吗？",
    "[MySQL|Redis|SSH|FTP|数据库|Kafka]用什么端口？", "怎么安装[Docker|Linux|MySQL|微信|Excel]？", "{k}的平方根是多少？", "{k}是质数吗？", "{k}的{d}次方是多少？", "{k}的百分之{d}是多少？", "我[很难过|很累|饿了|生病了|很无聊|不开心|失恋了]。", "怎么[减肥|赚钱|找工作|学开车|交朋友|睡得好]？",
    "{t}和{s}有什么区别？", "{t}和{s}哪个[好|更好|大]？", "{t}", "{t}？", "为什么[天是蓝的|人会做梦|猫会叫|鸟会飞|海水是咸的]？", "[蜘蛛|猫|狗|马]有几条腿？", "推荐一[本书|部电影|首歌|家餐厅|个游戏]。", "{t}是谁？", "世界上最富的人是谁？", "{t}多少钱？", "说出三种[动物|植物|水果|颜色]。", "{z}是什么？", "{z}{z}",
    "吃{t}好吗？", "{t}有什么[好处|坏处|作用|影响]？", "哪个[球队|歌手|演员|公司|品牌]最好？", "我应该买{t}吗？", "{t}哪一年[开始|结束|出现]？",
]  # fmt: skip
_NOW_ZH = [
    "[今天|明天|现在|这周|{c}|外面]天气[怎么样|如何|好吗]？", "[今天|明天|今晚]会下[雨|雪]吗？", "外面[冷|热|下雨了]吗？", "今天[多少度|几度|热不热|冷不冷|要带伞吗]？", "{c}[现在|]的天气怎么样？", "天气预报", "有什么新闻？", "今天有什么[新闻|大事]？", "最近发生了什么？", "说说最新的新闻。",
    "现在几点[了|]？", "[今天|现在]是[几号|星期几|几月几日|哪一天|哪一年]？", "今天周几？", "昨天谁赢了[比赛|]？", "[苹果|特斯拉|谷歌|腾讯]的股价是多少？", "现在路上堵吗？", "今天的汇率是多少？", "昨天[{c}|]发生了什么？", "今天几号？", "告诉我现在的时间。",
]  # fmt: skip
_TASK_ZH = [
    "写一[首|篇|个|封][诗|文章|故事|信|报告|笑话][，关于{t}|关于{t}|]。", "写一首关于{t}的诗。", "[请|帮我]写一篇关于{t}的[文章|作文|报告]。", "用[Python|Java|C++|Go]写一个[程序|函数|脚本|排序算法]。", "[写|改|调试|看看][我的|一段|这段]代码。", "把[你好|这句话|{t}]翻译成[法语|德语|日语|韩语|西班牙语]。",
    "讲[个|一个][笑话|故事|谜语]。", "唱[首|一首]歌。", "画[一张|一幅]{t}。", "总结一下[这篇文章|这本书|这段话]。", "放[点|首]音乐。", "[帮我|]订[一张|][机票|酒店|外卖|火车票|车票]。", "提醒我[明天开会|给妈妈打电话|吃药]。", "给[妈妈|老板|小王]打电话。", "发[邮件|短信|消息]给[老板|小王|妈妈]。", "设一个[七|八|六]点的闹钟。",
    "打开[窗户|灯|网页|空调|电视]。", "上网搜索{t}。", "给我一个{t}的菜谱。", "制定一个[旅行|学习|健身]计划。", "帮我[写作业|做饭|洗衣服|写简历|改作文]。", "生成一张{t}的图片。", "假装你是[海盗|医生|老师|{t}]。", "陪我下棋。", "给我编一个{t}的故事。",
]  # fmt: skip
_PEOPLE = ["Albert Einstein", "Barack Obama", "Taylor Swift", "Isaac Newton", "Marie Curie", "Steve Jobs", "Bill Gates", "Leonardo da Vinci", "Queen Victoria", "Mao Zedong", "Julius Caesar", "Charles Darwin", "Michael Jordan", "Bob Dylan", "my neighbour", "your mother", "Frida Kahlo", "Nelson Mandela", "Jane Austen", "Karl Marx"]  # fmt: skip
_ZH_RANDOM = "春夏秋冬风花雪月山水云雨木石鱼鸟虫草书画琴棋刀剑灯桌椅门窗床衣帽鞋伞糖盐油酒"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def _gibberish(rng: random.Random) -> str:
    return "".join(rng.choices(_LETTERS, k=rng.randint(3, 9)))


# What is asked in the project's own frames and is still none of its facts: software, and things that people do.
_SOFTWARE = [
    "MySQL",
    "Redis",
    "SSH",
    "FTP",
    "PostgreSQL",
    "MongoDB",
    "Kafka",
    "nginx",
    "DNS",
    "SMTP",
    "Apache",
    "a web server",
    "the mail server",
    "the printer",
    "Jenkins",
    "Telnet",
    "my router",
    "Tomcat",
    "Minecraft",
    "the database",
    "Elasticsearch",
    "HTTPS",
    "IMAP",
    "NTP",
    "Oracle",
]
_SOFTWARE_ZH = [
    "MySQL",
    "Redis",
    "SSH",
    "FTP",
    "PostgreSQL",
    "MongoDB",
    "Kafka",
    "nginx",
    "DNS",
    "邮件服务器",
    "打印机",
    "网页服务器",
    "路由器",
    "Tomcat",
    "数据库",
    "远程桌面",
    "HTTPS",
    "微信",
    "Oracle",
]
_DOINGS = [
    "bake bread",
    "learn French",
    "paint a wall",
    "grow roses",
    "repair a bike",
    "lose weight",
    "tie a knot",
    "fly a kite",
    "buy a house",
    "cook rice",
    "build a shed",
    "play chess",
    "write a novel",
    "install Linux",
    "compile a kernel",
    "clean a carpet",
    "catch fish",
    "sell a car",
    "mount a disk",
    "reset a password",
    "print a page",
    "edit a photo",
    "make tea",
    "clone a repository",
    "write a shell script",
    "sort a list",
    "open a bank account",
    "feed a cat",
    "walk a dog",
    "find a flat",
    "train for a marathon",
    "train a horse",
    "start a company",
    "run faster",
    "stop smoking",
    "use a hammer",
    "serve dinner",
    "convert to a religion",
    "load a truck",
    "change a tyre",
    "change my name",
    "measure the garden",
    "open a bottle",
    "close a wound",
    "run for mayor",
    "cancel a flight",
    "serve in the army",
    "test a battery",
    "set the table",
    "use Excel",
    "load a gun",
    "launch a rocket",
]
_DOINGS_ZH = ["烤面包", "学法语", "刷墙", "种花", "修自行车", "减肥", "打结", "放风筝", "买房子", "煮饭", "下象棋", "写小说", "安装Linux", "编译内核", "洗地毯", "钓鱼", "卖车", "重置密码", "打印文件", "修照片", "泡茶", "写脚本", "排序列表", "开银行账户", "喂猫", "遛狗", "找房子", "跑马拉松", "训练马", "创办公司", "跑得更快", "戒烟", "用锤子", "上菜", "换轮胎", "改名字", "量花园", "开瓶子", "取消机票", "当兵", "测电池", "摆桌子", "用Excel", "发射火箭", "换灯泡", "启动汽车", "打开箱子", "停止打嗝", "修电脑", "养鱼"]  # fmt: skip


def _strange_word(language: str, rng: random.Random) -> str:
    """A word that nobody knows, in the language's script."""
    if language == "en":
        return _gibberish(rng)
    return "".join(chr(rng.randint(0x4E00, 0x9FA5)) for _ in range(rng.randint(2, 3)))


def _in_the_projects_frames(language: str, rng: random.Random) -> Exchange:
    """The project's way of asking, with something else in it, so that the model looks at the thing and not the frame."""
    english = language == "en"
    frames = project.FRAMES_EN if english else project.FRAMES_ZH
    kind = rng.choices(("thing", "port", "do"), weights=(5, 2, 4))[0]
    words = {
        "thing": _TOPICS_EN if english else _TOPICS_ZH,
        "port": _SOFTWARE if english else _SOFTWARE_ZH,
        "do": _DOINGS if english else _DOINGS_ZH,
    }[kind]
    word = _strange_word(language, rng) if rng.random() < 0.15 else rng.choice(words)
    return Exchange(ask(frames[kind], rng, x=word), ANSWER_EN if english else ANSWER_ZH, language)


def exchange(language: str, rng: random.Random) -> Exchange:
    """One question outside the domain."""
    if rng.random() < 0.3:
        return _in_the_projects_frames(language, rng)
    kind = rng.random()
    english = language == "en"
    group = 0 if kind < 0.62 else 1 if kind < 0.78 else 2
    templates = ((_KNOWLEDGE_EN, _NOW_EN, _TASK_EN) if english else (_KNOWLEDGE_ZH, _NOW_ZH, _TASK_ZH))[group]
    answer = ((ANSWER_EN, NOW_EN, TASK_EN) if english else (ANSWER_ZH, NOW_ZH, TASK_ZH))[group]
    country = rng.choice(COUNTRIES)[0 if english else 2]
    if rng.random() < 0.1:
        country = invented(language, rng)
    topics = _TOPICS_EN if english else _TOPICS_ZH
    question = ask(
        templates, rng, t=rng.choice(topics), s=rng.choice(topics), c=country, n=rng.choice(_PEOPLE), d=rng.randint(2, 9),
        k=rng.randint(2, 200), g=_gibberish(rng), z="".join(rng.choices(_ZH_RANDOM, k=2)),
    )  # fmt: skip
    return Exchange(question, answer, language)
