"""The bodies of requests for embeddings and scores. /v1/embeddings is OpenAI's; the others have vLLM's fields, which
are Cohere's and Jina's too."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from charonia_client import GenerateRequest
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from charonia_gateway.schemas.fields import CACHE_SALT, CacheSalt, Prompt, wrong
from charonia_gateway.schemas.requests import INT32, MAX_TIMEOUT_S

MAX_INPUTS = 2048  # OpenAI's limit


def _document(value: Any) -> Any:
    """A text, or Cohere's and Jina's object with a text."""
    return value["text"] if isinstance(value, dict) and isinstance(value.get("text"), str) else value


Text = Annotated[str, Field(min_length=1)]
Document = Annotated[Text, BeforeValidator(_document)]
INSTRUCTION = "replaces the default instruction of a reranker whose template has one"


class PoolingBody(BaseModel):
    """Common fields of embeddings and scores."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    operation: ClassVar[str] = "embeddings"
    timings: ClassVar[None] = None
    input_field: ClassVar[str]  # the name of the texts, for errors

    model: str = Field(description="a name that /v1/models lists")
    user: str | None = Field(None, description="taken, without effect")
    cache_salt: CacheSalt = Field(None, description=CACHE_SALT)
    timeout: float | None = Field(
        None, gt=0, le=MAX_TIMEOUT_S, description="seconds after which the request ends with status 504"
    )
    priority: int | None = Field(None, ge=-(2**31), le=INT32, description="higher goes first; default 0")

    @property
    def engine_names(self) -> dict[str, str]:
        return dict.fromkeys(("text_input", "prompt_token_ids", "input_ids", "messages"), self.input_field)

    def _request(self, **given: Any) -> GenerateRequest:
        return GenerateRequest(
            cache_salt=self.cache_salt,
            timeout_ms=None if self.timeout is None else max(1, round(1000 * self.timeout)),
            priority=self.priority,
            stream=False,
            **given,
        )


class EmbeddingRequest(PoolingBody):
    """POST /v1/embeddings"""

    input_field: ClassVar[str] = "input"

    input: Prompt = Field(description=f"a text or token ids, or a list of up to {MAX_INPUTS} of them")
    dimensions: int | None = Field(
        None, ge=1, le=INT32, description="the embedding's first numbers, of length 1 again; default: all"
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="float (default), or base64: little-endian 32-bit floats"
    )

    @model_validator(mode="after")
    def _not_too_many(self) -> EmbeddingRequest:
        if len(self.input) > MAX_INPUTS:
            raise wrong(f"input: {len(self.input)} inputs are too many: send at most {MAX_INPUTS}")
        return self

    def engine_requests(self) -> list[GenerateRequest]:
        return [
            self._request(
                text=one if isinstance(one, str) else None,
                prompt_token_ids=None if isinstance(one, str) else one,
                pooling="embed",
                dimensions=self.dimensions,
            )
            for one in self.input
        ]


class _ScoringBody(PoolingBody):
    instruction: Text | None = Field(None, description=INSTRUCTION)

    def _scored(self, query: str, document: str) -> GenerateRequest:
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        if self.instruction is not None:
            messages.insert(0, {"role": "system", "content": self.instruction})
        return self._request(messages=messages, pooling="score")


class RerankRequest(_ScoringBody):
    """POST /v1/rerank"""

    input_field: ClassVar[str] = "documents"

    query: Text = Field(description="what the documents are ranked for")
    documents: list[Document] = Field(
        min_length=1, max_length=MAX_INPUTS, description='texts, or objects {"text": ...}'
    )
    top_n: int | None = Field(None, ge=0, description="the number of results, best first; default and 0: all")
    return_documents: bool | None = Field(None, description="false: results have no documents")

    def engine_requests(self) -> list[GenerateRequest]:
        return [self._scored(self.query, document) for document in self.documents]


class ScoreRequest(_ScoringBody):
    """POST /v1/score"""

    input_field: ClassVar[str] = "text_2"

    text_1: Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS)] = Field(
        description="a query, or one for each of text_2"
    )
    text_2: Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS)] = Field(
        description="a document or a list of documents"
    )

    @property
    def pairs(self) -> list[tuple[str, str]]:
        queries, documents = ([one] if isinstance(one, str) else one for one in (self.text_1, self.text_2))
        return list(zip(queries * len(documents) if len(queries) == 1 else queries, documents, strict=True))

    @model_validator(mode="after")
    def _paired(self) -> ScoreRequest:
        queries, documents = (1 if isinstance(one, str) else len(one) for one in (self.text_1, self.text_2))
        if queries not in (1, documents):
            raise wrong(
                f"text_1: it has {queries} texts and text_2 {documents}: send one text, or one for each of text_2"
            )
        return self

    def engine_requests(self) -> list[GenerateRequest]:
        return [self._scored(query, document) for query, document in self.pairs]
