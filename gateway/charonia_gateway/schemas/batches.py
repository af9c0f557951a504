"""OpenAI's files and batches."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from charonia_gateway.batches.lines import ENDPOINTS
from charonia_gateway.schemas.fields import wrong
from charonia_gateway.schemas.openai_responses import checked_metadata


def _endpoint(value: str) -> str:
    if value not in ENDPOINTS:
        raise wrong(f"send one of {', '.join(ENDPOINTS)}")
    return value


class BatchRequest(BaseModel):
    """POST /v1/batches"""

    model_config = ConfigDict(extra="allow", strict=True)

    input_file_id: str = Field(description="a file of POST /v1/files with purpose = batch")
    endpoint: Annotated[str, AfterValidator(_endpoint)] = Field(description=f"one of {', '.join(ENDPOINTS)}")
    completion_window: Literal["24h"] = Field(description="after this time requests that have not run are given up")
    metadata: Annotated[dict[str, str] | None, AfterValidator(checked_metadata)] = Field(
        None, description="returned with the batch"
    )


class FileBody(BaseModel):
    """A file, as OpenAI describes it."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: str = Field(description="batch, or batch_output for the answers of a batch")
    status: Literal["processed"]


class DeletedFile(BaseModel):
    id: str
    object: Literal["file"]
    deleted: bool


class BatchBody(BaseModel):
    """A batch, as OpenAI describes it. Times are seconds since 1970."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: dict[str, Any] | None = Field(description="wrong lines of the file, if the status is failed")
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None = Field(description="the answers with status 200")
    error_file_id: str | None = Field(description="the other answers, and requests that did not run")
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    cancelling_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelled_at: int | None
    request_counts: dict[str, int]
    metadata: dict[str, str] | None


class FileList(BaseModel):
    object: Literal["list"]
    data: list[FileBody]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchList(FileList):
    data: list[BatchBody]  # type: ignore[assignment]
