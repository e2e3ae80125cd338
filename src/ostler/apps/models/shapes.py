"""What the routes take and give, as the API's description has it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from ostler.apps.models import captioning, diarization, embedding, generation, given, ocr, speech

_Text = Annotated[str, Field(min_length=1, max_length=given.LETTERS)]
_MODEL = "GET /api/v1/health lists the models of each task"


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Reply(BaseModel):
    model: str = Field(description="the model that answered")
    request_id: str | None = None
    processing_time_ms: float | None = Field(None, description="in the model's process")


class EmbeddingRequest(_Request):
    texts: Annotated[list[_Text], Field(min_length=1, max_length=given.TEXTS)]
    model: str = Field(embedding.PACKAGED[0], description=_MODEL)


class EmbeddingReply(_Reply):
    embeddings: list[list[float]] = Field(description="a vector of length 1 for each text")
    dimensions: int
    tokens: int
    truncated: list[int] = Field(description="the numbers of texts that were longer than the model can see")


class OcrRequest(_Request):
    image: str = Field(description="base64; or send the file itself as the body, or as the part `file` of a form")
    model: str = Field(ocr.PACKAGED[0], description=_MODEL)
    min_score: Annotated[float, Field(ge=0, le=1)] = 0.5


class OcrLine(BaseModel):
    text: str
    score: float
    box: list[list[float]] = Field(description="four corners (x, y), from the top left on")


class OcrReply(_Reply):
    text: str = Field(description="all lines")
    lines: list[OcrLine]
    width: int
    height: int


class SpeechRequest(_Request):
    audio: str = Field(description="base64; or send the file itself as the body, or as the part `file` of a form")
    model: str = Field(speech.PACKAGED[0], description=_MODEL)


class SpeechSegment(BaseModel):
    start: float = Field(description="seconds")
    end: float
    text: str


class SpeechReply(_Reply):
    text: str
    segments: list[SpeechSegment]
    seconds: float = Field(description="how long the recording is")


class DiarizationRequest(_Request):
    audio: str = Field(description="base64; or send the file itself as the body, or as the part `file` of a form")
    model: str = Field(diarization.PACKAGED[0], description=_MODEL)
    speakers: Annotated[int, Field(ge=0, le=8)] = Field(0, description="how many there are; 0: find out")


class SpeakerSegment(BaseModel):
    start: float
    end: float
    speaker: str


class DiarizationReply(_Reply):
    speakers: int
    segments: list[SpeakerSegment]
    seconds: float


class Message(BaseModel):
    role: Literal["system", "user", "assistant"]
    content: _Text


class GenerationRequest(_Request):
    prompt: _Text | None = Field(None, description="this, or messages")
    messages: Annotated[list[Message], Field(min_length=1, max_length=100)] | None = None
    model: str = Field(generation.PACKAGED[0], description=_MODEL)
    max_tokens: Annotated[int, Field(ge=1, le=2048)] = 256
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=0)] | None = None
    stop: list[str] | str | None = None
    stream: bool = Field(False, description="server-sent events: `{text}` for each piece, then `{done, …}`")


class GenerationReply(_Reply):
    text: str
    tokens: int
    prompt_tokens: int
    finish_reason: Literal["stop", "length"]


class CaptioningRequest(_Request):
    image: str = Field(description="base64; or send the file itself as the body, or as the part `file` of a form")
    model: str = Field(captioning.PACKAGED[0], description=_MODEL)
    max_tokens: Annotated[int, Field(ge=1, le=200)] = 40


class Tag(BaseModel):
    label: str
    score: float


class CaptioningReply(_Reply):
    caption: str
    method: Literal["tags-and-text", "captioning-model"] = Field(
        description="tags-and-text: a language model wrote it from the tags and the text, without having seen the image"
    )
    tags: list[Tag]
    text: str = Field(description="what is written in the image")


class WorkerState(BaseModel):
    state: str = Field(description="STARTING, READY, BUSY, TERMINATED or FAILED")
    socket: str | None = Field(description="its Unix socket in the run directory; it has no port")
    idle_seconds: float | None
    memory_mb: float | None
    in_flight: int


class Health(BaseModel):
    status: Literal["healthy", "degraded"]
    workers: dict[str, WorkerState] = Field(description="models that are loaded, by `task:model`")
    gpu_lock_held: bool = Field(description="in exclusive mode, whether a model loads or answers now")
