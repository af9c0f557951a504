"""English phrasings that are never used in training. `{a} {b} {c} {k} {n} {fr} {to}` are filled in by questions.py."""

from __future__ import annotations

ARITHMETIC: dict[str, list[str]] = {
    "+": [
        "Could you figure out {a} + {b} for me?", "What total do {a} and {b} give?", "When I add {a} to {b}, what comes out?", "Let us see: how much would {a} plus {b} be?",
        "Tom owns {a} pencils and his aunt gives him {b} more. How many pencils does he own now?", "Quickly, {a} + {b}!", "{a} plus {b} comes to what?",
        "What do I get from {a} + {b}?", "My calculator is broken, what is {a}+{b}?",
    ],
    "-": [
        "Could you figure out {a} - {b} for me?", "What remains when I take {b} from {a}?", "How much would {a} minus {b} be?", "I had {a} candles and burned {b}. How many candles are left?",
        "Quickly, {a} - {b}!", "{a} minus {b} comes to what?", "What do I get from {a} - {b}?", "If {b} is subtracted from {a}, what is the result?", "What does {a} less {b} make?",
    ],
    "*": [
        "Could you figure out {a} * {b} for me?", "How much would {a} times {b} be?", "There are {a} rows with {b} chairs each. How many chairs in all?", "Quickly, {a} x {b}!",
        "{a} times {b} comes to what?", "What do I get from {a} x {b}?", "If you multiply {a} by {b}, what is the result?", "What comes out when {a} is multiplied by {b}?",
    ],
    "/": ["How much would {a} divided by {b} be?", "Could you figure out {a} / {b} for me?", "If I divide {a} by {b}, what is the result?"],
}  # fmt: skip

CAPITALS = [
    "Can you remember the capital of {c}?", "Which city serves as the capital of {c}?", "Name of {c}'s capital city?", "I am going to {c}. What is its capital?", "What might the capital of {c} be?",
    "My teacher asks for the capital of {c}.", "Say the capital of {c}.", "{c} has which city as its capital?", "Would you tell me {c}'s capital?", "Capital city of {c}, please",
    "Let me know the capital of {c}.", "What was the capital of {c} again?", "Where is the capital of {c}?", "Which town is the capital of {c}?",
]  # fmt: skip
CAPITALS_REVERSE = [
    "{k} is the capital city of which nation?",
    "Which nation has its capital in {k}?",
    "Tell me which country {k} is the capital of.",
    "For what country is {k} the capital?",
]
# Names that never occur in training: real places outside the table, and invented ones.
UNKNOWN_PLACES = ["Djibouti", "Sri Lanka", "the Maldives", "Barbados", "Seychelles", "Mordor", "Ruritania", "Genovia", "Zubrowka", "Arendelle", "Tasmania", "Saint Lucia"]  # fmt: skip

UNITS = [
    "Could you tell me how many {to} there are in {n} {fr}?", "How many {to} would {n} {fr} be?", "Please tell me {n} {fr} in {to}.", "If I have {n} {fr}, how many {to} do I have?",
    "What does {n} {fr} come to in {to}?", "{n} {fr} equal how many {to}?", "I would like {n} {fr} converted to {to}.", "How many {to} fit into {n} {fr}?", "Work out {n} {fr} in {to}.",
    "How many {to} can I count in {n} {fr}?", "Transform {n} {fr} to {to}.", "What would {n} {fr} be in {to}?",
]  # fmt: skip
DEGREES = [
    "How hot is {n} degrees Celsius in Fahrenheit?",
    "Tell me {n} Celsius in Fahrenheit.",
    "What would {n} degrees Celsius be in degrees Fahrenheit?",
]
UNKNOWN_UNITS = ["How many inches would 3 metres be?", "If I have 5 pounds, how many kilograms do I have?", "What does 10 miles come to in kilometres?", "How many leagues fit into 7 kilometres?"]  # fmt: skip

# (question, what the answer must hold, all of it)
PROJECT: list[tuple[str, list[str]]] = [
    ("Could you describe what Charonia is?", ["engine"]), ("In short, what is this Charonia thing?", ["engine"]), ("What is the purpose of Charonia?", ["engine"]),
    ("Where did the project get the name Charonia from?", ["shell"]), ("For what reason is it named Charonia?", ["shell"]), ("What is behind the name of Charonia?", ["shell"]),
    ("On which port can I reach Triton over HTTP?", ["33336"]), ("Which port should HTTP requests to Triton go to?", ["33336"]), ("What is Triton's port for HTTP?", ["33336"]),
    ("On which port can I reach gRPC?", ["33337"]), ("My gRPC client needs a port, which one?", ["33337"]), ("What is Triton's port for gRPC?", ["33337"]),
    ("On which port do I see the metrics?", ["33338"]), ("From which port does Prometheus read the metrics?", ["33338"]), ("Where can I get the engine's metrics?", ["33338"]),
    ("On which port can I reach the gateway?", ["23333"]), ("Where should I send OpenAI requests, to which port?", ["23333"]), ("The gateway listens on which port?", ["23333"]),
    ("Could you list every port that Charonia uses?", ["33336", "33337", "33338", "23333"]), ("Show me the ports.", ["33336", "23333"]),
    ("What role does the gateway play?", ["FastAPI|OpenAI"]), ("Will the openai client work with the gateway?", ["openai"]),
    ("Could you explain what a k/v block is?", ["keys and values|k/v block"]), ("What do you mean by k/v block?", ["keys and values"]), ("How many tokens fit in one k/v block?", ["64"]),
    ("Which states are there for a k/v block?", ["Free", "Active", "Cached"]), ("Tell me the states that a block can have.", ["Free", "Cached"]),
    ("What is the idea of prefix caching?", ["prompt", "again"]), ("How do you reuse prefixes?", ["prompt|prefix"]),
    ("What should I type to start the server?", ["make serve"]), ("Which command gets the server going?", ["make serve"]), ("How is Charonia started?", ["make serve"]), ("For what is make serve used?", ["Triton"]),
    ("Where do I start Charonia?", ["make serve"]), ("What should I type to run the tests?", ["make test"]), ("With which command are all tests run?", ["make test"]), ("How could I run all of the tests?", ["make test"]),
    ("What should I type to open the chat?", ["make chat"]), ("How could I chat in my terminal?", ["make chat"]), ("With which command do I chat with the model?", ["make chat|charonia chat"]),
    ("What should I type to convert a model?", ["charonia convert"]), ("How could I get a workspace from a Hugging Face model?", ["charonia convert"]), ("For what is charonia convert used?", ["workspace"]),
    ("Could you describe what a workspace is?", ["folder|weights"]), ("What would I find inside a workspace?", ["weights"]),
    ("How could I leave the chat?", ["exit"]), ("In the chat, how do I send a message?", ["double Enter"]),
    ("What should I type to run a benchmark?", ["charonia benchmark"]), ("How could I measure throughput?", ["charonia benchmark"]), ("With which command do I measure the speed?", ["charonia benchmark"]),
    ("How could I serve a model of my own?", ["MODEL"]), ("What should I set to use a different model?", ["MODEL"]),
    ("What licence is Charonia published under?", ["Apache-2\\.0"]), ("Which license applies to this project?", ["Apache-2\\.0"]), ("Tell me Charonia's license.", ["Apache-2\\.0"]), ("Is the project open source?", ["Apache-2\\.0"]),
    ("For what does Charonia use Triton?", ["Triton", "back end|inference server"]), ("Could you describe what Triton is?", ["inference server"]),
    ("What is the file name of the back end?", ["libtriton_charonia"]), ("Could you describe the back end for Triton?", ["libtriton_charonia"]),
    ("Which models does Triton have loaded?", ["preprocessing", "ensemble"]), ("Could you name the four models in Triton?", ["preprocessing", "postprocessing"]), ("Why is there an ensemble?", ["preprocessing"]),
    ("What is the job of preprocessing?", ["template", "token"]), ("What is the job of postprocessing?", ["text"]),
    ("How could I cancel a request?", ["stop request|close"]), ("What happens to a request when its client disconnects?", ["stops|block"]),
    ("Which families of models can Charonia serve?", ["Llama", "Qwen"]), ("Will Charonia run Mistral?", ["Mistral"]),
    ("Can it run without a GPU?", ["CPU"]), ("Must I have a GPU?", ["CPU"]), ("In what language was Charonia written?", ["C\\+\\+20"]), ("Which programming language does the engine use?", ["C\\+\\+20"]),
    ("Where do I change the inference parameters?", ["config\\.ini"]), ("What is config.ini used for?", ["parameters"]),
    ("How could I use the engine from Python?", ["from_pretrained"]), ("Is it possible to use Charonia in Python?", ["Python"]), ("How could I stream an answer?", ["stream"]),
    ("What is the job of the scheduler?", ["step"]), ("What happens if the blocks run out?", ["youngest|recomputed"]), ("Does the same request always give the same tokens?", ["same"]),
    ("Where could I read the API docs?", ["23333/docs"]), ("Which versions of Python are supported?", ["3\\.10", "3\\.12"]),
]  # fmt: skip

SMALLTALK: list[tuple[str, list[str]]] = [
    ("Hello, dear friend!", ["hello"]), ("Hi Tritonis!", ["hello"]), ("Good morning to you", ["hello"]), ("Hey you", ["hello"]), ("A very good evening!", ["hello"]), ("Hello, how are you doing today?", ["well|hello"]),
    ("How are you feeling today?", ["well"]), ("Are you doing fine?", ["well"]), ("How is your day going?", ["well"]),
    ("May I ask who you are?", ["Tritonis"]), ("And you are?", ["Tritonis"]), ("Would you introduce yourself?", ["Tritonis"]), ("What name do you have?", ["Tritonis"]), ("Could you tell me your name?", ["Tritonis"]),
    ("Are you some kind of AI?", ["Tritonis"]), ("Is this a bot?", ["Tritonis"]), ("Which language model are you?", ["Tritonis"]),
    ("Who trained this model?", ["script|repository"]), ("How did you come to be trained?", ["script|repository"]), ("Who are the people that built you?", ["script|repository"]),
    ("What are the things you can do?", ["capitals"]), ("Tell me your abilities.", ["capitals"]), ("With what can you help me?", ["capitals"]), ("What sort of questions can you answer?", ["capitals"]), ("Can you understand Chinese?", ["Chinese"]),
    ("Thanks so much!", ["welcome"]), ("Thank you very much, Tritonis", ["welcome"]), ("Oh great, thank you", ["welcome"]), ("That was very helpful, thanks", ["welcome"]), ("Thanks for all your help", ["welcome"]), ("You are really helpful", ["welcome"]),
    ("Goodbye, Tritonis", ["goodbye"]), ("Bye, see you tomorrow", ["goodbye"]), ("Have a great evening, bye", ["goodbye"]), ("I must go now, see you", ["goodbye"]), ("OK bye bye", ["goodbye"]),
]  # fmt: skip

UNKNOWN = [
    "Who painted the Mona Lisa?", "How do clouds form?", "Could you write a limerick about frogs?", "What will the weather be like on Sunday?", "How many goals did Ronaldo score last season?",
    "Give me a good recipe for apple pie.", "What's the best laptop for students?", "Explain the theory of relativity.", "How do I change the oil in my car?", "Who is the current president of France?",
    "Write a Java class for a linked list.", "What is the tallest building in the world?", "Should I invest in gold?", "Is it going to rain in Berlin this evening?", "Translate 'good morning' into Italian.",
    "What did the news say this morning?", "How long do turtles live?", "What's on television tonight?", "Tell me something funny.", "Who directed Titanic?", "What is the chemical formula of water?",
    "When did the Second World War end?", "Please compose a love song.", "What time does the train to Hamburg leave?", "Can you fix the bug in my Python code?", "Why is the sky blue?",
    "How many people live in Tokyo?", "What currency do they use in Japan?", "Which language do people speak in Brazil?", "Who governs Canada at the moment?", "How far is it from Paris to London?",
    "What are the symptoms of flu?", "How do I train a puppy?", "What is the cube root of 27?", "Which port does an SSH server listen on?", "What is your opinion on politics?",
    "Do you know a nice hotel in Rome?", "Who won the football match yesterday evening?", "Which year did Columbus reach America?", "Explain how a combustion engine works.", "My stomach hurts, what can I do?",
    "Please book me a flight to Madrid.", "How do I delete a branch in git?", "What is the largest animal on Earth?", "Could you draw a castle?", "Who sang Thriller?", "How do I boil an egg?",
    "What is the latest iPhone?", "Is there water on the Moon?", "Recommend a good science fiction novel.",
]  # fmt: skip
