"""The answers' JSON as types: for the document at /openapi.json, and for tests that hold it true.

Answers are written from prepared bytes and plain dicts, never from these.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Struct = msgspec.Struct
UNSET = msgspec.UNSET
Tier = Literal["priority", "default", "flex"]  # that it was served at, where one was asked for


class ErrorObject(Struct):
    """What was wrong; param: the field, if one was."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Struct):
    """Any refusal, in OpenAI's shape."""

    error: ErrorObject


class MessagesErrorObject(Struct):
    """What was wrong, in Anthropic's words."""

    type: str
    message: str
    param: str | None = None
    code: str | None = None


class MessagesError(Struct):
    """Any refusal of /v1/messages."""

    type: Literal["error"]
    error: MessagesErrorObject


class PromptDetails(Struct):
    """cached_tokens: found in the prefix cache."""

    cached_tokens: int


class CompletionDetails(Struct):
    """Prediction tokens: guesses of the engine that held, or did not."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Struct):
    """Token counts; prompt_tokens includes the cached ones."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class ChatMessage(Struct):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None = None


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: str


class ChatCompletion(Struct):
    """An answer of /v1/chat/completions; streamed, it comes as chat.completion.chunk objects."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: Tier | msgspec.UnsetType = UNSET


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str


class Completion(Struct):
    """An answer of /v1/completions; streamed, it comes as objects of the same kind."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    service_tier: Tier | msgspec.UnsetType = UNSET


class Embedding(Struct):
    """embedding: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class Embeddings(Struct):
    """An answer of /v1/embeddings; pooling: how a text became one vector."""

    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: EmbeddingsUsage
    pooling: str
    service_tier: Tier | msgspec.UnsetType = UNSET


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseObject(Struct):
    """An answer of /v1/responses; streamed, numbered events build it."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "in_progress", "failed"]
    error: dict[str, Any] | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]


class ResponseDeleted(Struct):
    id: str
    object: Literal["response"]
    deleted: bool


class MessagesUsage(Struct):
    """Anthropic's counts: input_tokens are those that no cache had."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessage(Struct):
    """An answer of /v1/messages; streamed, message_start and what follows build it."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessagesUsage


class TokenCount(Struct):
    input_tokens: int


class Tokens(Struct):
    """token_strs: each token's text, if asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(Struct):
    prompt: str


class Model(Struct):
    """max_model_len: the longest sequence, in tokens."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class FileObject(Struct):
    """A file; expires_at: when it is deleted, in Unix seconds."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str
    expires_at: int | None = None


class FileList(Struct):
    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(Struct):
    id: str
    object: Literal["file"]
    deleted: bool


class BatchError(Struct):
    """What is wrong with the input file, and in which line of it."""

    code: str
    line: int | None
    message: str
    param: str | None


class BatchErrors(Struct):
    object: Literal["list"]
    data: list[BatchError]


class BatchCounts(Struct):
    total: int
    completed: int
    failed: int


class BatchObject(Struct):
    """A batch; times are Unix seconds, null until then."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling",
        "cancelled",
    ]  # fmt: skip
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    usage: ResponseUsage
    metadata: dict[str, str] | None


class BatchList(Struct):
    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ModelList(Struct):
    object: Literal["list"]
    data: list[Model]


class Status(Struct):
    """ok, or what is wrong (503)."""

    status: str


class Version(Struct):
    version: str


class Load(Struct):
    """How busy the server is; kv_usage: the share of the KV blocks that running sequences hold."""

    server_load: int
    requests: int
    max_requests: int
    sequences_running: int
    sequences_waiting: int
    prompt_tokens_waiting: int
    kv_blocks: int
    kv_blocks_held: int
    kv_blocks_cached: int
    kv_usage: float
    draining: bool
