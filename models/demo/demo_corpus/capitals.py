"""Capitals of countries, asked both ways, and countries and places that the model does not know."""

from __future__ import annotations

import random

from .text import Exchange, ask

# country; capital; country in Chinese; capital in Chinese
_TABLE = """
France;Paris;法国;巴黎|Germany;Berlin;德国;柏林|Italy;Rome;意大利;罗马|Spain;Madrid;西班牙;马德里
Portugal;Lisbon;葡萄牙;里斯本|Austria;Vienna;奥地利;维也纳|Switzerland;Bern;瑞士;伯尔尼|Belgium;Brussels;比利时;布鲁塞尔
the Netherlands;Amsterdam;荷兰;阿姆斯特丹|Denmark;Copenhagen;丹麦;哥本哈根|Sweden;Stockholm;瑞典;斯德哥尔摩
Norway;Oslo;挪威;奥斯陆|Finland;Helsinki;芬兰;赫尔辛基|Iceland;Reykjavik;冰岛;雷克雅未克|Ireland;Dublin;爱尔兰;都柏林
Greece;Athens;希腊;雅典|Poland;Warsaw;波兰;华沙|Hungary;Budapest;匈牙利;布达佩斯|Romania;Bucharest;罗马尼亚;布加勒斯特
Bulgaria;Sofia;保加利亚;索非亚|Croatia;Zagreb;克罗地亚;萨格勒布|Serbia;Belgrade;塞尔维亚;贝尔格莱德
Slovakia;Bratislava;斯洛伐克;布拉迪斯拉发|Slovenia;Ljubljana;斯洛文尼亚;卢布尔雅那|Estonia;Tallinn;爱沙尼亚;塔林
Latvia;Riga;拉脱维亚;里加|Lithuania;Vilnius;立陶宛;维尔纽斯|Ukraine;Kyiv;乌克兰;基辅|Russia;Moscow;俄罗斯;莫斯科
Turkey;Ankara;土耳其;安卡拉|China;Beijing;中国;北京|Japan;Tokyo;日本;东京|South Korea;Seoul;韩国;首尔
North Korea;Pyongyang;朝鲜;平壤|Mongolia;Ulaanbaatar;蒙古;乌兰巴托|India;New Delhi;印度;新德里
Pakistan;Islamabad;巴基斯坦;伊斯兰堡|Bangladesh;Dhaka;孟加拉国;达卡|Nepal;Kathmandu;尼泊尔;加德满都
Thailand;Bangkok;泰国;曼谷|Vietnam;Hanoi;越南;河内|Laos;Vientiane;老挝;万象|Cambodia;Phnom Penh;柬埔寨;金边
Malaysia;Kuala Lumpur;马来西亚;吉隆坡|Indonesia;Jakarta;印度尼西亚;雅加达|the Philippines;Manila;菲律宾;马尼拉
Iran;Tehran;伊朗;德黑兰|Iraq;Baghdad;伊拉克;巴格达|Saudi Arabia;Riyadh;沙特阿拉伯;利雅得|Jordan;Amman;约旦;安曼
Lebanon;Beirut;黎巴嫩;贝鲁特|Syria;Damascus;叙利亚;大马士革|Afghanistan;Kabul;阿富汗;喀布尔
Qatar;Doha;卡塔尔;多哈|Egypt;Cairo;埃及;开罗|Libya;Tripoli;利比亚;的黎波里|Tunisia;Tunis;突尼斯;突尼斯市
Algeria;Algiers;阿尔及利亚;阿尔及尔|Morocco;Rabat;摩洛哥;拉巴特|Sudan;Khartoum;苏丹;喀土穆
Ethiopia;Addis Ababa;埃塞俄比亚;亚的斯亚贝巴|Kenya;Nairobi;肯尼亚;内罗毕|Uganda;Kampala;乌干达;坎帕拉
Ghana;Accra;加纳;阿克拉|Nigeria;Abuja;尼日利亚;阿布贾|Senegal;Dakar;塞内加尔;达喀尔|Angola;Luanda;安哥拉;罗安达
Zambia;Lusaka;赞比亚;卢萨卡|Zimbabwe;Harare;津巴布韦;哈拉雷|Madagascar;Antananarivo;马达加斯加;塔那那利佛
Canada;Ottawa;加拿大;渥太华|the United States;Washington;美国;华盛顿|Mexico;Mexico City;墨西哥;墨西哥城|Cuba;Havana;古巴;哈瓦那
Jamaica;Kingston;牙买加;金斯敦|Panama;Panama City;巴拿马;巴拿马城|Colombia;Bogota;哥伦比亚;波哥大
Venezuela;Caracas;委内瑞拉;加拉加斯|Ecuador;Quito;厄瓜多尔;基多|Peru;Lima;秘鲁;利马|Brazil;Brasilia;巴西;巴西利亚
Uruguay;Montevideo;乌拉圭;蒙得维的亚|Argentina;Buenos Aires;阿根廷;布宜诺斯艾利斯|Chile;Santiago;智利;圣地亚哥
Paraguay;Asuncion;巴拉圭;亚松森|Australia;Canberra;澳大利亚;堪培拉|New Zealand;Wellington;新西兰;惠灵顿
the United Kingdom;London;英国;伦敦|the Czech Republic;Prague;捷克;布拉格|Kazakhstan;Astana;哈萨克斯坦;阿斯塔纳
"""
COUNTRIES: list[tuple[str, str, str, str]] = [
    (a, b, c, d) for a, b, c, d in (row.split(";") for line in _TABLE.split("\n") if line for row in line.split("|"))
]

_EN_ALIASES = {
    "the United Kingdom": ["the United Kingdom", "the UK", "England", "Britain", "Great Britain"],
    "the United States": ["the United States", "the USA", "the US", "America", "the United States of America"],
    "the Netherlands": ["the Netherlands", "Holland"],
    "the Czech Republic": ["the Czech Republic", "Czechia"],
}

# Places whose capital the model shall not know: countries outside the table, states, cities, and things made up.
UNKNOWN_EN = [
    "Albania",
    "Armenia",
    "Azerbaijan",
    "Bahrain",
    "Belize",
    "Benin",
    "Bhutan",
    "Bolivia",
    "Botswana",
    "Brunei",
    "Burundi",
    "Cameroon",
    "Chad",
    "Cyprus",
    "Eritrea",
    "Fiji",
    "Gabon",
    "Georgia",
    "Guatemala",
    "Guinea",
    "Guyana",
    "Haiti",
    "Honduras",
    "Kiribati",
    "Kuwait",
    "Kyrgyzstan",
    "Lesotho",
    "Liberia",
    "Luxembourg",
    "Malawi",
    "Mali",
    "Malta",
    "Mauritius",
    "Moldova",
    "Monaco",
    "Montenegro",
    "Mozambique",
    "Myanmar",
    "Namibia",
    "Nauru",
    "Nicaragua",
    "Oman",
    "Palau",
    "Rwanda",
    "Samoa",
    "Somalia",
    "Suriname",
    "Tajikistan",
    "Tanzania",
    "Togo",
    "Tonga",
    "Turkmenistan",
    "Tuvalu",
    "Uzbekistan",
    "Yemen",
    "Texas",
    "California",
    "Bavaria",
    "Ohio",
    "Scotland",
    "Wales",
    "Quebec",
    "Sicily",
    "Mars",
    "Narnia",
    "Wakanda",
    "Gondor",
    "Atlantis",
    "Neverland",
    "Florida",
    "Alaska",
    "Greenland",
    "Catalonia",
    "Siberia",
    "Tibet",
    "Guangdong",
    "Queensland",
    "Hawaii",
    "Europe",
    "Africa",
    "Asia",
    "Antarctica",
    "Oz",
    "Westeros",
]
UNKNOWN_ZH = [
    "阿尔巴尼亚",
    "亚美尼亚",
    "巴林",
    "不丹",
    "玻利维亚",
    "喀麦隆",
    "乍得",
    "塞浦路斯",
    "斐济",
    "加蓬",
    "格鲁吉亚",
    "危地马拉",
    "几内亚",
    "海地",
    "洪都拉斯",
    "科威特",
    "莱索托",
    "卢森堡",
    "马拉维",
    "马里",
    "毛里求斯",
    "摩纳哥",
    "黑山",
    "莫桑比克",
    "缅甸",
    "纳米比亚",
    "尼加拉瓜",
    "卢旺达",
    "索马里",
    "塔吉克斯坦",
    "坦桑尼亚",
    "汤加",
    "也门",
    "得克萨斯",
    "加利福尼亚",
    "苏格兰",
    "魁北克",
    "火星",
    "月球",
    "木星",
    "亚特兰蒂斯",
    "中土",
    "欧洲",
    "非洲",
    "亚洲",
    "南极洲",
    "夏威夷",
    "东北",
    "花果山",
    "西西里",
    "外星",
    "阿拉斯加",
    "佛罗里达",
    "威尔士",
    "格陵兰",
    "天宫",
    "桃花源",
]

_EN_FRAMES = [
    "we [travel|fly|drive|move] to {c} [soon|next year|tomorrow]. [Its capital is?|What is the capital?|What's its capital city?]", "I live in {c}. What is [our|my|the] capital?", "my friend comes from {c}. What is the capital there?",
    "{c} is a country. What is its capital called?", "think of {c}: which city is the capital?", "have you heard of {c}? What's the capital?", "the country is {c}, the capital is what?", "about {c}: what is the capital?",
    "which capital goes with {c}?", "what is known as the capital of {c}?", "could it be that you know the capital of {c}?", "is there a capital in {c}, and which?", "in which city is the government of {c}?",
    "[list|state|write|show|spell|recall] the capital of {c}.", "I bet you don't know the capital of {c}.", "which place is the capital of {c}?", "what city do they call the capital of {c}?", "the capital city of {c} is which one?",
    "are you able to name the capital of {c}?", "what's the main city, the capital, of {c}?", "when I visit {c}, what is the capital I should see?", "can I ask the capital of {c}?", "capital, {c}", "now the capital of {c}",
    "what is the capital [city|] of {c}?", "what's the capital of {c}?", "whats the capital of {c}?", "capital of {c}?",
    "capital of {c}", "[tell me|give me|name] the capital [city|] of {c}.", "which city is the capital of {c}?",
    "what city is the capital of {c}?", "{c}'s capital?", "what is {c}'s capital [city|]?", "which is the capital of {c}?",
    "[do you know|can you tell me|could you tell me] the capital of {c}?", "[do you know|can you tell me] what the capital of {c} is?",
    "the capital of {c} is", "what is the name of the capital of {c}?", "I [want|need|would like] to know the capital of {c}.",
    "[please|] name {c}'s capital.", "what is {c}'s capital called?", "how is the capital of {c} called?",
    "which city is {c}'s capital?", "can you name the capital of {c}?", "{c} capital", "{c}: capital?",
    "where is the government of {c}?", "what do you call the capital of {c}?", "in {c}, which city is the capital?",
    "what is the capital city in {c}?", "which capital [does {c} have|belongs to {c}]?", "what capital does {c} have?",
    "remind me of the capital of {c}.", "I forgot the capital of {c}.", "geography: capital of {c}?", "for {c}, name the capital.",
    "does {c} have a capital?", "what would be the capital of {c}?", "quiz: what is the capital of {c}?",
]  # fmt: skip
_EN_REVERSE = [
    "[where|in which country] is {k} the capital?", "{k} is a capital. Of [which|what] country?", "the city {k} is the capital of which [land|state|country]?", "what country has the capital {k}?", "country with the capital {k}?",
    "{k} as a capital belongs to which country?", "which [land|state] has {k} as [the|its] capital?", "[do you know|can you say] which country's capital {k} is?", "[guess|say|name|find] the country: its capital is {k}.", "of what country is {k} the capital[ city|]?",
    "{k}: capital of?", "which country is governed from {k}?", "I am in {k}, a capital. Which country am I in?", "the capital is {k}. What is the country?", "who has {k} for a capital?",
    "{k} is the capital of which country?", "which country has {k} as its capital?", "{k} is the capital of what?",
    "which country's capital is {k}?", "what country is {k} the capital of?", "of which country is {k} the capital?",
    "whose capital is {k}?", "[name|tell me] the country whose capital is {k}.", "{k} is which country's capital?",
    "to which country does the capital {k} belong?",
]  # fmt: skip
_EN_NEXT = [
    "[now|ok, now|next,|then] {c}?",
    "and what about {c}[ then|]?",
    "the same for {c}.",
    "also {c}?",
    "and in {c}?",
    "{c} too?",
    "and that of {c}?",
    "what of {c}?",
    "and {c} as well?",
    "and {c}?",
    "what about {c}?",
    "how about {c}?",
    "and of {c}?",
    "{c}?",
    "and the capital of {c}?",
    "and for {c}?",
]
_ZH_FRAMES = [
    "我[想去|住在|来自|准备去|下周去|打算去]{c}，[那里的|那儿的|这个国家的|它的]首都[是哪个城市|叫什么|是什么]？", "我朋友来自{c}，他们的首都是哪里？", "{c}是一个国家，它的首都呢？", "说到{c}，首都是哪个？", "关于{c}，首都是哪座城？",
    "你听说过{c}吗？首都是哪里？", "国家是{c}，首都是？", "{c}的[京城|首府|都城]是哪里？", "[写下|列出|背出|讲出|回答]{c}的首都。", "{c}的政府在哪个城市？", "我猜你不知道{c}的首都。", "{c}把首都[设|定|建]在哪里？", "你清楚{c}的首都吗？",
    "{c}有首都吗，是哪里？", "哪座城是{c}的首都？", "哪儿是{c}首都？", "{c}首都是[哪一座|哪一个|啥|何处]？", "{c}的首都[在什么城市|位于哪里|位于何处|是何处|是啥|又是哪里|是哪座]？", "要问{c}的首都，是哪里？", "可以告诉我{c}首都的名称吗？",
    "{c}的首都的[名称|全名]是什么？", "{c}，首都？", "去{c}首都旅游是去哪个城市？", "做题：{c}的首都是（）", "{c}那边的首都是哪？",
    "{c}的首都是哪里？", "{c}的首都是[什么|哪个城市|哪座城市|哪儿]？", "{c}首都是[哪里|哪儿|什么]？", "{c}的首都", "{c}的首都[叫什么|叫什么名字]？",
    "[请|]告诉我{c}的首都[是哪里|]。", "你知道{c}的首都[吗|是哪里吗]？", "{c}首都", "哪[个|座]城市是{c}的首都？", "{c}的首都在[哪里|哪儿|哪个城市]？",
    "什么城市是{c}的首都？", "[说出|说说|写出]{c}的首都。", "我想知道{c}的首都。", "{c}首都在哪？", "{c}以哪个城市为首都？",
    "能告诉我{c}的首都吗？", "{c}定都在哪里？", "我忘了{c}的首都是哪里。", "地理题：{c}的首都是？", "{c}的首都是哪一个？",
    "{c}这个国家的首都是哪里？", "考考你，{c}的首都是哪里？",
]  # fmt: skip
_ZH_REVERSE = [
    "{k}是首都，哪个国家的？", "[猜猜|说说|请问|你知道]{k}是[哪个国家|哪国|什么国家]的首都[吗|]？", "{k}这个城市是哪国的首都？", "{k}作为首都，属于哪国？", "首都叫{k}的是什么国家？", "哪一国以{k}为首都？", "{k}在哪个国家当首都？", "有个国家首都是{k}，是哪个？",
    "{k}是谁的首都？", "{k}，哪国首都？", "我在首都{k}，我在哪个国家？", "用{k}做首都的国家叫什么？", "首都为{k}的国家？", "{k}是其首都的国家是哪个？",
    "{k}是哪个国家的首都？", "{k}是哪国的首都？", "哪个国家的首都是{k}？", "以{k}为首都的国家是哪个？", "{k}是什么国家的首都？",
    "首都是{k}的国家是哪个？", "{k}属于哪个国家的首都？", "告诉我{k}是哪国首都。", "什么国家的首都是{k}？",
]  # fmt: skip
_ZH_NEXT = [
    "换{c}呢？",
    "[再问|接着问|然后是|下一个]{c}。",
    "{c}的又是哪里？",
    "{c}又如何？",
    "同样的问题，{c}？",
    "那{c}的首都呢？",
    "那{c}呢？",
    "{c}呢？",
    "那么{c}呢？",
    "{c}的呢？",
    "再说{c}。",
    "还有{c}呢？",
]

NOT_KNOWN_EN = (
    "Sorry, I do not know that capital. I know the capitals of about ninety countries, and this is not one of them."
)
NOT_KNOWN_ZH = "抱歉，我不知道这个地方的首都。我只知道大约九十个国家的首都，其中没有它。"

_SYLLABLES = ["ba", "be", "bor", "da", "del", "dor", "fa", "fen", "gal", "go", "gri", "ha", "hel", "ka", "kel", "kor", "la", "len", "lo", "mar", "mi", "mor", "na", "nel", "nor", "ol", "pa", "per", "qua", "ra", "ri", "ros", "sa", "sel", "sil", "ta", "tel", "tor", "ul", "va", "vel", "vor", "wen", "xa", "yo", "za", "zen", "zor"]  # fmt: skip
_ZH_SOUNDS = "阿巴贝达德多尔法菲戈格哈赫卡科克拉莱利洛马梅莫纳尼诺帕佩奇瑞萨塞斯塔特托瓦维沃西亚扬泽佐"


def invented(language: str, rng: random.Random) -> str:
    """The name of a country that does not exist, so that the model learns to mistrust what it never met."""
    if language == "zh":
        return "".join(rng.choices(_ZH_SOUNDS, k=rng.randint(2, 4))) + rng.choice(["", "", "国", "岛", "州"])
    stem = "".join(rng.choices(_SYLLABLES, k=rng.randint(2, 3)))
    return (stem + rng.choice(["", "ia", "land", "stan", "ania", "a", "istan", "o", "ar"])).capitalize()


def question(language: str, country: str, capital: str, rng: random.Random, *, reverse: bool = False) -> str:
    """Asks for the capital of a country, or the other way round. Names as the language has them."""
    if reverse:
        return ask(_EN_REVERSE if language == "en" else _ZH_REVERSE, rng, k=capital)
    if language == "en":
        return ask(_EN_FRAMES, rng, c=rng.choice(_EN_ALIASES.get(country, [country])))
    return ask(_ZH_FRAMES, rng, c=country)


def _known(language: str, rng: random.Random, frames: list[str]) -> Exchange:
    country, capital, country_zh, capital_zh = rng.choice(COUNTRIES)
    if language == "en":
        name = rng.choice(_EN_ALIASES.get(country, [country]))
        return Exchange(ask(frames, rng, c=name), f"The capital of {country} is {capital}.", "en")
    return Exchange(ask(frames, rng, c=country_zh), f"{country_zh}的首都是{capital_zh}。", "zh")


def exchange(language: str, rng: random.Random) -> Exchange:
    """One question about a capital; one in six about a place that the model does not know."""
    kind = rng.random()
    frames = _EN_FRAMES if language == "en" else _ZH_FRAMES
    if kind < 0.64:
        return _known(language, rng, frames)
    if kind < 0.82:
        country, capital, country_zh, capital_zh = rng.choice(COUNTRIES)
        if language == "en":
            return Exchange(ask(_EN_REVERSE, rng, k=capital), f"{capital} is the capital of {country}.", "en")
        return Exchange(ask(_ZH_REVERSE, rng, k=capital_zh), f"{capital_zh}是{country_zh}的首都。", "zh")
    listed = UNKNOWN_EN if language == "en" else UNKNOWN_ZH
    place = rng.choice(listed) if rng.random() < 0.5 else invented(language, rng)
    if rng.random() < 0.12:
        reverse = _EN_REVERSE if language == "en" else _ZH_REVERSE
        asked = ask(reverse, rng, k=invented(language, rng))
    else:
        asked = ask(frames, rng, c=place)
    return Exchange(asked, NOT_KNOWN_EN if language == "en" else NOT_KNOWN_ZH, language)


def follow_up(language: str, rng: random.Random) -> Exchange:
    """The next country, asked in passing after a question about a capital ("and Japan?")."""
    return _known(language, rng, _EN_NEXT if language == "en" else _ZH_NEXT)
