"""Questions with known answers. Counts how many of them a model answers correctly.

A file has one JSON object per line, of one of two kinds:

    {"prompt": "What is the capital of Norway?", "answer": "Oslo"}
    {"prompt": "What is the capital of Norway?", "choices": ["Bergen", "Oslo"], "answer": 1}

For the first kind, the model generates a text. It is correct if it contains the answer, or any answer of a list.
For the second kind, the model generates nothing: its answer is the most probable choice. `answer` is the index of the
correct choice, from 0. `prompt` is a text, or a list of chat messages in OpenAI's format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from charonia.api.engine import Engine
from charonia.api.results import Output, SamplingParams
from charonia.errors import InvalidRequestError

MAX_ANSWER_TOKENS = 128
_AT_ONCE = 32  # questions per step of the progress bar
_ENDS = "?.!:\u3002\uff1f\uff01\uff1a"  # the last four are the Chinese ones
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")


class Question(BaseModel):
    """A line of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: str | list[dict[str, Any]] = Field(min_length=1)
    answer: int | str | list[str]
    choices: list[str] | None = Field(None, min_length=2)

    @model_validator(mode="after")
    def _answer_fits(self) -> Question:
        if self.choices is None:
            if isinstance(self.answer, int) or not self.answer or not all(map(str.strip, self.answers)):
                raise ValueError("answer must be a text, or a list of texts, and none of them may be empty")
        elif not all(map(str.strip, self.choices)):
            raise ValueError("choices must not be empty: a choice without tokens would always be the most likely")
        elif not isinstance(self.answer, int) or not 0 <= self.answer < len(self.choices):
            raise ValueError(f"answer must be the index of a choice, 0 to {len(self.choices) - 1}")
        return self

    @property
    def answers(self) -> list[str]:
        """The accepted answers; the response must contain one of them."""
        assert not isinstance(self.answer, int)
        return [self.answer] if isinstance(self.answer, str) else self.answer

    def passes(self, said: str) -> bool:
        """Whether `said` contains an accepted answer as whole words, ignoring case. "20,000" matches 20000."""
        said = _THOUSANDS.sub("", said)
        return any(re.search(_as_words(answer), said, re.IGNORECASE) for answer in self.answers)


def _as_words(text: str) -> str:
    """Return a pattern that finds "7" in "is 7." and "是7。" but not in "17", "7.5" or "7th"."""
    word = "[A-Za-z0-9]"
    begins = rf"(?<!{word})(?<![0-9][.,])" if re.match(word, text) else ""
    ends = rf"(?!{word})(?![.,][0-9])" if re.search(rf"{word}$", text) else ""
    return f"{begins}{re.escape(text)}{ends}"


def read_questions(file: Path) -> list[Question]:
    """Read the questions. Raises InvalidRequestError with the wrong line and the reason."""
    try:
        # splitlines() would also cut at U+2028 and similar characters within a text.
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"questions cannot be read from {file}: {error}") from None
    questions = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            questions.append(Question.model_validate(json.loads(line)))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise InvalidRequestError(f"{file}, line {number}: {place or 'the question'}: {first['msg']}") from None
        except json.JSONDecodeError as error:
            raise InvalidRequestError(f"{file}, line {number} is not a JSON object: {error}") from None
    if not questions:
        raise InvalidRequestError(f"{file} has no questions: each line must be a JSON object with prompt and answer")
    return questions


def check_prompts(engine: Engine, questions: Sequence[Question]) -> None:
    """Raises InvalidRequestError for a question that is longer than the model's context."""
    longest = engine.info.session_len - 1
    for question in questions:
        prompts = _choice_prompts(engine, question)[0] if question.choices else [_prompt(engine, question)[0]]
        most = max(map(len, prompts))
        if most > longest:
            raise InvalidRequestError(
                f"the question {str(question.prompt)[:60]!r} has {most} tokens, but {engine.info.model_name} takes at "
                f"most {longest} (session_len - 1)"
            )


def answers_right(
    engine: Engine, questions: Sequence[Question], advance: Callable[[int], None] = lambda _: None
) -> int:
    """Return the number of correct answers. advance: called with the number of questions that are done."""
    right = 0
    for at in range(0, len(questions), _AT_ONCE):
        part = questions[at : at + _AT_ONCE]
        spoken = [question for question in part if question.choices is None]
        chosen = [question for question in part if question.choices is not None]
        right += sum(question.passes(said) for question, said in zip(spoken, _say(engine, spoken), strict=True))
        right += sum(
            question.answer == choice for question, choice in zip(chosen, _choose(engine, chosen), strict=True)
        )
        advance(len(part))
    return right


def _prompt(engine: Engine, question: Question) -> tuple[list[int], bool]:
    """Return token ids, and whether they are a chat. A text becomes a user message if the model supports chats."""
    if not isinstance(question.prompt, str):
        return engine.encode(question.prompt), True
    if engine.tokenizer.chat_template is not None:
        return engine.encode([{"role": "user", "content": question.prompt}]), True
    text = question.prompt if question.prompt[-1] not in _ENDS else f"Question: {question.prompt}\nAnswer:"
    return engine.encode(text), False


def _say(engine: Engine, questions: Sequence[Question]) -> list[str]:
    prompts, sampling = [], []
    for question in questions:
        ids, chat = _prompt(engine, question)
        prompts.append(ids)
        stop = [] if chat else ["\n"]  # a model without chats would continue with more questions
        sampling.append(SamplingParams(max_tokens=MAX_ANSWER_TOKENS, temperature=0, stop=stop))
    return [output.text for output in engine.generate(prompts, sampling)] if prompts else []


def _choose(engine: Engine, questions: Sequence[Question]) -> list[int]:
    """Return the most likely choice of each question, by the sum of its tokens' log probabilities."""
    prompts: list[list[int]] = []
    begins: list[int] = []  # position of the choice in its prompt
    for question in questions:
        own_prompts, begin = _choice_prompts(engine, question)
        prompts += own_prompts
        begins += [begin] * len(own_prompts)
    outputs = engine.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0)) if prompts else []
    scores = iter([_score(output, begin) for output, begin in zip(outputs, begins, strict=True)])
    out = []
    for question in questions:
        own = [next(scores) for _ in question.choices or ()]
        out.append(own.index(max(own)))
    return out


def _choice_prompts(engine: Engine, question: Question) -> tuple[list[list[int]], int]:
    """Return the question with each of its choices, and the position of the choices."""
    ids, chat = _prompt(engine, question)
    texts = [choice if chat else f" {choice.lstrip()}" for choice in question.choices or ()]
    return [ids + engine.tokenizer.encode(text, add_special_tokens=False) for text in texts], len(ids)


def _score(output: Output, begin: int) -> float:
    return sum(output.prompt_logprobs[begin - 1 :])
