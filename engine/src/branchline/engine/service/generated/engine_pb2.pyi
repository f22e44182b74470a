from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_CODE_UNSPECIFIED: _ClassVar[ErrorCode]
    ERROR_CODE_INVALID_ARGUMENT: _ClassVar[ErrorCode]
    ERROR_CODE_NOT_FOUND: _ClassVar[ErrorCode]
    ERROR_CODE_UNAUTHENTICATED: _ClassVar[ErrorCode]
    ERROR_CODE_RESOURCE_EXHAUSTED: _ClassVar[ErrorCode]
    ERROR_CODE_UNAVAILABLE: _ClassVar[ErrorCode]
    ERROR_CODE_DEADLINE_EXCEEDED: _ClassVar[ErrorCode]
    ERROR_CODE_UNIMPLEMENTED: _ClassVar[ErrorCode]
    ERROR_CODE_INTERNAL: _ClassVar[ErrorCode]
    ERROR_CODE_CANCELLED: _ClassVar[ErrorCode]

class Enforcement(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENFORCEMENT_UNSPECIFIED: _ClassVar[Enforcement]
    ENFORCEMENT_STRICT: _ClassVar[Enforcement]
    ENFORCEMENT_BEST_EFFORT: _ClassVar[Enforcement]

class DisaggregationHalf(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DISAGGREGATION_HALF_UNSPECIFIED: _ClassVar[DisaggregationHalf]
    DISAGGREGATION_HALF_PREFILL: _ClassVar[DisaggregationHalf]
    DISAGGREGATION_HALF_DECODE: _ClassVar[DisaggregationHalf]

class LeaseState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEASE_STATE_UNSPECIFIED: _ClassVar[LeaseState]
    LEASE_STATE_HELD: _ClassVar[LeaseState]
    LEASE_STATE_LOST: _ClassVar[LeaseState]
    LEASE_STATE_UNMATCHED: _ClassVar[LeaseState]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]

class EmbedTask(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EMBED_TASK_UNSPECIFIED: _ClassVar[EmbedTask]
    EMBED_TASK_EMBED: _ClassVar[EmbedTask]
    EMBED_TASK_RANK: _ClassVar[EmbedTask]
ERROR_CODE_UNSPECIFIED: ErrorCode
ERROR_CODE_INVALID_ARGUMENT: ErrorCode
ERROR_CODE_NOT_FOUND: ErrorCode
ERROR_CODE_UNAUTHENTICATED: ErrorCode
ERROR_CODE_RESOURCE_EXHAUSTED: ErrorCode
ERROR_CODE_UNAVAILABLE: ErrorCode
ERROR_CODE_DEADLINE_EXCEEDED: ErrorCode
ERROR_CODE_UNIMPLEMENTED: ErrorCode
ERROR_CODE_INTERNAL: ErrorCode
ERROR_CODE_CANCELLED: ErrorCode
ENFORCEMENT_UNSPECIFIED: Enforcement
ENFORCEMENT_STRICT: Enforcement
ENFORCEMENT_BEST_EFFORT: Enforcement
DISAGGREGATION_HALF_UNSPECIFIED: DisaggregationHalf
DISAGGREGATION_HALF_PREFILL: DisaggregationHalf
DISAGGREGATION_HALF_DECODE: DisaggregationHalf
LEASE_STATE_UNSPECIFIED: LeaseState
LEASE_STATE_HELD: LeaseState
LEASE_STATE_LOST: LeaseState
LEASE_STATE_UNMATCHED: LeaseState
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
EMBED_TASK_UNSPECIFIED: EmbedTask
EMBED_TASK_EMBED: EmbedTask
EMBED_TASK_RANK: EmbedTask

class Error(_message.Message):
    __slots__ = ("code", "message", "field", "retry_after_ms")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    code: ErrorCode
    message: str
    field: str
    retry_after_ms: int
    def __init__(self, code: _Optional[_Union[ErrorCode, str]] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "token_ids", "sampling", "logprobs", "cache_namespace", "priority", "deadline_ms", "traceparent", "resume", "lease", "grammar", "draft", "disaggregation", "cache_tier")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHE_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    DISAGGREGATION_FIELD_NUMBER: _ClassVar[int]
    CACHE_TIER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    logprobs: LogprobParams
    cache_namespace: CacheNamespace
    priority: int
    deadline_ms: int
    traceparent: str
    resume: Resume
    lease: Lease
    grammar: Grammar
    draft: Draft
    disaggregation: Disaggregation
    cache_tier: int
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., logprobs: _Optional[_Union[LogprobParams, _Mapping]] = ..., cache_namespace: _Optional[_Union[CacheNamespace, _Mapping]] = ..., priority: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., traceparent: _Optional[str] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., lease: _Optional[_Union[Lease, _Mapping]] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., draft: _Optional[_Union[Draft, _Mapping]] = ..., disaggregation: _Optional[_Union[Disaggregation, _Mapping]] = ..., cache_tier: _Optional[int] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed", "n", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "include_stop", "logit_bias")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    seed: int
    n: int
    max_tokens: int
    min_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    skip_special_tokens: bool
    include_stop: bool
    logit_bias: _containers.ScalarMap[int, float]
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., n: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., skip_special_tokens: _Optional[bool] = ..., include_stop: _Optional[bool] = ..., logit_bias: _Optional[_Mapping[int, float]] = ...) -> None: ...

class LogprobParams(_message.Message):
    __slots__ = ("output", "top_k", "input_start", "token_ids")
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    INPUT_START_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    output: bool
    top_k: int
    input_start: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, output: _Optional[bool] = ..., top_k: _Optional[int] = ..., input_start: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class CacheNamespace(_message.Message):
    __slots__ = ("cache_salt", "extra_key", "adapter", "adapter_digest")
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    EXTRA_KEY_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    cache_salt: str
    extra_key: str
    adapter: str
    adapter_digest: str
    def __init__(self, cache_salt: _Optional[str] = ..., extra_key: _Optional[str] = ..., adapter: _Optional[str] = ..., adapter_digest: _Optional[str] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("emitted_token_ids", "emitted_text_bytes", "sequence_index")
    EMITTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EMITTED_TEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_INDEX_FIELD_NUMBER: _ClassVar[int]
    emitted_token_ids: _containers.RepeatedScalarFieldContainer[int]
    emitted_text_bytes: int
    sequence_index: int
    def __init__(self, emitted_token_ids: _Optional[_Iterable[int]] = ..., emitted_text_bytes: _Optional[int] = ..., sequence_index: _Optional[int] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("lease_id", "acquire_ttl_ms", "tenant")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    ACQUIRE_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    acquire_ttl_ms: int
    tenant: str
    def __init__(self, lease_id: _Optional[str] = ..., acquire_ttl_ms: _Optional[int] = ..., tenant: _Optional[str] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("json_schema", "regex", "ebnf", "structural_tag", "choice", "backend", "tenant", "reasoning", "enforcement", "report")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    EBNF_FIELD_NUMBER: _ClassVar[int]
    STRUCTURAL_TAG_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    ENFORCEMENT_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    ebnf: str
    structural_tag: str
    choice: str
    backend: str
    tenant: str
    reasoning: Reasoning
    enforcement: Enforcement
    report: bool
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., ebnf: _Optional[str] = ..., structural_tag: _Optional[str] = ..., choice: _Optional[str] = ..., backend: _Optional[str] = ..., tenant: _Optional[str] = ..., reasoning: _Optional[_Union[Reasoning, _Mapping]] = ..., enforcement: _Optional[_Union[Enforcement, str]] = ..., report: _Optional[bool] = ...) -> None: ...

class Reasoning(_message.Message):
    __slots__ = ("begin", "end", "implicit", "max_tokens")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    IMPLICIT_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    begin: str
    end: str
    implicit: bool
    max_tokens: int
    def __init__(self, begin: _Optional[str] = ..., end: _Optional[str] = ..., implicit: _Optional[bool] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class Draft(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Disaggregation(_message.Message):
    __slots__ = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "parameters", "half")
    BOOTSTRAP_HOST_FIELD_NUMBER: _ClassVar[int]
    BOOTSTRAP_PORT_FIELD_NUMBER: _ClassVar[int]
    BOOTSTRAP_ROOM_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    HALF_FIELD_NUMBER: _ClassVar[int]
    bootstrap_host: str
    bootstrap_port: int
    bootstrap_room: int
    parameters: str
    half: DisaggregationHalf
    def __init__(self, bootstrap_host: _Optional[str] = ..., bootstrap_port: _Optional[int] = ..., bootstrap_room: _Optional[int] = ..., parameters: _Optional[str] = ..., half: _Optional[_Union[DisaggregationHalf, str]] = ...) -> None: ...

class SequenceDelta(_message.Message):
    __slots__ = ("handle", "index", "token_ids", "text", "logprobs", "prompt", "input_logprobs", "finish", "error", "lease")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    INPUT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: TokenLogprobs
    prompt: PromptReport
    input_logprobs: TokenLogprobs
    finish: Finish
    error: Error
    lease: LeaseReport
    def __init__(self, handle: _Optional[int] = ..., index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Union[TokenLogprobs, _Mapping]] = ..., prompt: _Optional[_Union[PromptReport, _Mapping]] = ..., input_logprobs: _Optional[_Union[TokenLogprobs, _Mapping]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., lease: _Optional[_Union[LeaseReport, _Mapping]] = ...) -> None: ...

class PromptReport(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("start", "token_ids", "logprobs", "top", "chosen")
    START_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    start: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top: _containers.RepeatedCompositeFieldContainer[TopLogprobs]
    chosen: _containers.RepeatedCompositeFieldContainer[TopLogprobs]
    def __init__(self, start: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., top: _Optional[_Iterable[_Union[TopLogprobs, _Mapping]]] = ..., chosen: _Optional[_Iterable[_Union[TopLogprobs, _Mapping]]] = ...) -> None: ...

class TopLogprobs(_message.Message):
    __slots__ = ("token_ids", "logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class LeaseReport(_message.Message):
    __slots__ = ("state", "grant")
    STATE_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    state: LeaseState
    grant: LeaseGrant
    def __init__(self, state: _Optional[_Union[LeaseState, str]] = ..., grant: _Optional[_Union[LeaseGrant, _Mapping]] = ...) -> None: ...

class LeaseGrant(_message.Message):
    __slots__ = ("lease_id", "engine_id", "tokens", "pages", "ttl_ms")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    engine_id: str
    tokens: int
    pages: int
    ttl_ms: int
    def __init__(self, lease_id: _Optional[str] = ..., engine_id: _Optional[str] = ..., tokens: _Optional[int] = ..., pages: _Optional[int] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("reason", "matched_token_id", "matched_stop", "completion_tokens", "retractions", "message", "timings", "grammar")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETRACTIONS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    matched_token_id: int
    matched_stop: str
    completion_tokens: int
    retractions: int
    message: str
    timings: Timings
    grammar: GrammarReport
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., matched_token_id: _Optional[int] = ..., matched_stop: _Optional[str] = ..., completion_tokens: _Optional[int] = ..., retractions: _Optional[int] = ..., message: _Optional[str] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., grammar: _Optional[_Union[GrammarReport, _Mapping]] = ...) -> None: ...

class GrammarReport(_message.Message):
    __slots__ = ("backend", "reason", "compile_ms", "mask_p99_ms", "constrained_tokens", "forced_tokens", "complete", "enforced", "valid")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    COMPILE_MS_FIELD_NUMBER: _ClassVar[int]
    MASK_P99_MS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORCED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    ENFORCED_FIELD_NUMBER: _ClassVar[int]
    VALID_FIELD_NUMBER: _ClassVar[int]
    backend: str
    reason: str
    compile_ms: float
    mask_p99_ms: float
    constrained_tokens: int
    forced_tokens: int
    complete: bool
    enforced: bool
    valid: bool
    def __init__(self, backend: _Optional[str] = ..., reason: _Optional[str] = ..., compile_ms: _Optional[float] = ..., mask_p99_ms: _Optional[float] = ..., constrained_tokens: _Optional[int] = ..., forced_tokens: _Optional[int] = ..., complete: _Optional[bool] = ..., enforced: _Optional[bool] = ..., valid: _Optional[bool] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_ms", "prefill_ms", "decode_ms", "detokenise_ms", "drafted_tokens", "accepted_tokens")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_MS_FIELD_NUMBER: _ClassVar[int]
    DETOKENISE_MS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    detokenise_ms: float
    drafted_tokens: int
    accepted_tokens: int
    def __init__(self, queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., decode_ms: _Optional[float] = ..., detokenise_ms: _Optional[float] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("hello", "submit", "cancel")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    submit: Submit
    cancel: Cancel
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("gateway_id", "contract_revision")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_REVISION_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    contract_revision: int
    def __init__(self, gateway_id: _Optional[str] = ..., contract_revision: _Optional[int] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("handle", "request")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request: GenerateRequest
    def __init__(self, handle: _Optional[int] = ..., request: _Optional[_Union[GenerateRequest, _Mapping]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    def __init__(self, handle: _Optional[int] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("welcome", "frame")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    frame: StepFrame
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., frame: _Optional[_Union[StepFrame, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("engine_id", "contract_revision")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_REVISION_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    contract_revision: int
    def __init__(self, engine_id: _Optional[str] = ..., contract_revision: _Optional[int] = ...) -> None: ...

class StepFrame(_message.Message):
    __slots__ = ("step", "deltas")
    STEP_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    step: int
    deltas: _containers.RepeatedCompositeFieldContainer[SequenceDelta]
    def __init__(self, step: _Optional[int] = ..., deltas: _Optional[_Iterable[_Union[SequenceDelta, _Mapping]]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("deltas",)
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    deltas: _containers.RepeatedCompositeFieldContainer[SequenceDelta]
    def __init__(self, deltas: _Optional[_Iterable[_Union[SequenceDelta, _Mapping]]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id", "abort_all")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ABORT_ALL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    abort_all: bool
    def __init__(self, request_id: _Optional[str] = ..., abort_all: _Optional[bool] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted",)
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    aborted: int
    def __init__(self, aborted: _Optional[int] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("model_path", "served_model_names", "architecture", "vocab_size", "context_length", "eos_token_ids", "bos_token_id", "page_size", "dtype", "numerics_id", "weight_version", "default_sampling", "max_request_tokens", "executor", "output_promise", "role", "tasks", "embedding_size")
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    SERVED_MODEL_NAMES_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_PROMISE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_SIZE_FIELD_NUMBER: _ClassVar[int]
    model_path: str
    served_model_names: _containers.RepeatedScalarFieldContainer[str]
    architecture: str
    vocab_size: int
    context_length: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bos_token_id: int
    page_size: int
    dtype: str
    numerics_id: str
    weight_version: str
    default_sampling: SamplingParams
    max_request_tokens: int
    executor: str
    output_promise: str
    role: str
    tasks: _containers.RepeatedScalarFieldContainer[str]
    embedding_size: int
    def __init__(self, model_path: _Optional[str] = ..., served_model_names: _Optional[_Iterable[str]] = ..., architecture: _Optional[str] = ..., vocab_size: _Optional[int] = ..., context_length: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., bos_token_id: _Optional[int] = ..., page_size: _Optional[int] = ..., dtype: _Optional[str] = ..., numerics_id: _Optional[str] = ..., weight_version: _Optional[str] = ..., default_sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., max_request_tokens: _Optional[int] = ..., executor: _Optional[str] = ..., output_promise: _Optional[str] = ..., role: _Optional[str] = ..., tasks: _Optional[_Iterable[str]] = ..., embedding_size: _Optional[int] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "engine_id", "uptime_s", "options_json", "cache", "load", "steps", "scheduler_ms_per_step", "components", "speculative", "handover")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_JSON_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_MS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_FIELD_NUMBER: _ClassVar[int]
    HANDOVER_FIELD_NUMBER: _ClassVar[int]
    version: str
    engine_id: str
    uptime_s: float
    options_json: str
    cache: CacheStats
    load: GetLoadResponse
    steps: int
    scheduler_ms_per_step: float
    components: _containers.RepeatedScalarFieldContainer[str]
    speculative: SpeculativeStats
    handover: HandoverStats
    def __init__(self, version: _Optional[str] = ..., engine_id: _Optional[str] = ..., uptime_s: _Optional[float] = ..., options_json: _Optional[str] = ..., cache: _Optional[_Union[CacheStats, _Mapping]] = ..., load: _Optional[_Union[GetLoadResponse, _Mapping]] = ..., steps: _Optional[int] = ..., scheduler_ms_per_step: _Optional[float] = ..., components: _Optional[_Iterable[str]] = ..., speculative: _Optional[_Union[SpeculativeStats, _Mapping]] = ..., handover: _Optional[_Union[HandoverStats, _Mapping]] = ...) -> None: ...

class CacheStats(_message.Message):
    __slots__ = ("page_size", "pages_total", "pages_free", "pages_evictable", "pages_protected", "pages_private", "prompt_tokens", "cached_tokens", "lookups", "hits", "evicted_pages", "retractions", "pages_leased", "leases", "lease_budget_pages", "host_pages_total", "host_pages_used", "host_stored_pages", "host_fetched_pages", "preemptions")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    PAGES_EVICTABLE_FIELD_NUMBER: _ClassVar[int]
    PAGES_PROTECTED_FIELD_NUMBER: _ClassVar[int]
    PAGES_PRIVATE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_PAGES_FIELD_NUMBER: _ClassVar[int]
    RETRACTIONS_FIELD_NUMBER: _ClassVar[int]
    PAGES_LEASED_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    LEASE_BUDGET_PAGES_FIELD_NUMBER: _ClassVar[int]
    HOST_PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    HOST_PAGES_USED_FIELD_NUMBER: _ClassVar[int]
    HOST_STORED_PAGES_FIELD_NUMBER: _ClassVar[int]
    HOST_FETCHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    pages_total: int
    pages_free: int
    pages_evictable: int
    pages_protected: int
    pages_private: int
    prompt_tokens: int
    cached_tokens: int
    lookups: int
    hits: int
    evicted_pages: int
    retractions: int
    pages_leased: int
    leases: int
    lease_budget_pages: int
    host_pages_total: int
    host_pages_used: int
    host_stored_pages: int
    host_fetched_pages: int
    preemptions: int
    def __init__(self, page_size: _Optional[int] = ..., pages_total: _Optional[int] = ..., pages_free: _Optional[int] = ..., pages_evictable: _Optional[int] = ..., pages_protected: _Optional[int] = ..., pages_private: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., lookups: _Optional[int] = ..., hits: _Optional[int] = ..., evicted_pages: _Optional[int] = ..., retractions: _Optional[int] = ..., pages_leased: _Optional[int] = ..., leases: _Optional[int] = ..., lease_budget_pages: _Optional[int] = ..., host_pages_total: _Optional[int] = ..., host_pages_used: _Optional[int] = ..., host_stored_pages: _Optional[int] = ..., host_fetched_pages: _Optional[int] = ..., preemptions: _Optional[int] = ...) -> None: ...

class HandoverStats(_message.Message):
    __slots__ = ("rooms", "pulls", "sent_pages", "received_pages", "failed_pulls", "expired_rooms", "received_bytes")
    ROOMS_FIELD_NUMBER: _ClassVar[int]
    PULLS_FIELD_NUMBER: _ClassVar[int]
    SENT_PAGES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_PAGES_FIELD_NUMBER: _ClassVar[int]
    FAILED_PULLS_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_ROOMS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    rooms: int
    pulls: int
    sent_pages: int
    received_pages: int
    failed_pulls: int
    expired_rooms: int
    received_bytes: int
    def __init__(self, rooms: _Optional[int] = ..., pulls: _Optional[int] = ..., sent_pages: _Optional[int] = ..., received_pages: _Optional[int] = ..., failed_pulls: _Optional[int] = ..., expired_rooms: _Optional[int] = ..., received_bytes: _Optional[int] = ...) -> None: ...

class SpeculativeStats(_message.Message):
    __slots__ = ("steps", "drafted_tokens", "accepted_tokens")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    drafted_tokens: int
    accepted_tokens: int
    def __init__(self, steps: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTokenizerResponse(_message.Message):
    __slots__ = ("manifest", "tokenizer_json")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_JSON_FIELD_NUMBER: _ClassVar[int]
    manifest: TokenizerManifest
    tokenizer_json: bytes
    def __init__(self, manifest: _Optional[_Union[TokenizerManifest, _Mapping]] = ..., tokenizer_json: _Optional[bytes] = ...) -> None: ...

class TokenizerManifest(_message.Message):
    __slots__ = ("tokenizer_json_bytes", "tokenizer_json_sha256", "chat_template", "eos_token_ids", "bos_token", "eos_token", "pad_token", "add_special_tokens")
    TOKENIZER_JSON_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_JSON_SHA256_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PAD_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokenizer_json_bytes: int
    tokenizer_json_sha256: bytes
    chat_template: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bos_token: str
    eos_token: str
    pad_token: str
    add_special_tokens: bool
    def __init__(self, tokenizer_json_bytes: _Optional[int] = ..., tokenizer_json_sha256: _Optional[bytes] = ..., chat_template: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., bos_token: _Optional[str] = ..., eos_token: _Optional[str] = ..., pad_token: _Optional[str] = ..., add_special_tokens: _Optional[bool] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("running", "waiting", "waiting_uncached_tokens", "pages_used", "pages_total", "queue_age_ms", "step_age_ms", "adapters_version")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGES_USED_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    QUEUE_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_VERSION_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    waiting_uncached_tokens: int
    pages_used: int
    pages_total: int
    queue_age_ms: float
    step_age_ms: float
    adapters_version: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., waiting_uncached_tokens: _Optional[int] = ..., pages_used: _Optional[int] = ..., pages_total: _Optional[int] = ..., queue_age_ms: _Optional[float] = ..., step_age_ms: _Optional[float] = ..., adapters_version: _Optional[int] = ...) -> None: ...

class SubscribeKvEventsRequest(_message.Message):
    __slots__ = ("include_token_ids",)
    INCLUDE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    include_token_ids: bool
    def __init__(self, include_token_ids: _Optional[bool] = ...) -> None: ...

class SubscribeKvEventsResponse(_message.Message):
    __slots__ = ("epoch", "sequence", "snapshot", "snapshot_end", "events", "page_size")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_END_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequence: int
    snapshot: bool
    snapshot_end: bool
    events: _containers.RepeatedCompositeFieldContainer[KvEvent]
    page_size: int
    def __init__(self, epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., snapshot: _Optional[bool] = ..., snapshot_end: _Optional[bool] = ..., events: _Optional[_Iterable[_Union[KvEvent, _Mapping]]] = ..., page_size: _Optional[int] = ...) -> None: ...

class KvEvent(_message.Message):
    __slots__ = ("stored", "removed", "cleared")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    stored: BlocksStored
    removed: BlocksRemoved
    cleared: BlocksCleared
    def __init__(self, stored: _Optional[_Union[BlocksStored, _Mapping]] = ..., removed: _Optional[_Union[BlocksRemoved, _Mapping]] = ..., cleared: _Optional[_Union[BlocksCleared, _Mapping]] = ...) -> None: ...

class BlocksStored(_message.Message):
    __slots__ = ("parent_hash", "block_hashes", "token_ids")
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    parent_hash: int
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, parent_hash: _Optional[int] = ..., block_hashes: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class BlocksRemoved(_message.Message):
    __slots__ = ("block_hashes",)
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block_hashes: _Optional[_Iterable[int]] = ...) -> None: ...

class BlocksCleared(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ("flushed_pages", "held_pages")
    FLUSHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    HELD_PAGES_FIELD_NUMBER: _ClassVar[int]
    flushed_pages: int
    held_pages: int
    def __init__(self, flushed_pages: _Optional[int] = ..., held_pages: _Optional[int] = ...) -> None: ...

class PullKvRequest(_message.Message):
    __slots__ = ("open", "ack")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    open: PullOpen
    ack: PullAck
    def __init__(self, open: _Optional[_Union[PullOpen, _Mapping]] = ..., ack: _Optional[_Union[PullAck, _Mapping]] = ...) -> None: ...

class PullOpen(_message.Message):
    __slots__ = ("room", "numerics_id", "page_size", "page_bytes", "pages", "last_hash", "skip_pages", "backends")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    LAST_HASH_FIELD_NUMBER: _ClassVar[int]
    SKIP_PAGES_FIELD_NUMBER: _ClassVar[int]
    BACKENDS_FIELD_NUMBER: _ClassVar[int]
    room: int
    numerics_id: str
    page_size: int
    page_bytes: int
    pages: int
    last_hash: int
    skip_pages: int
    backends: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, room: _Optional[int] = ..., numerics_id: _Optional[str] = ..., page_size: _Optional[int] = ..., page_bytes: _Optional[int] = ..., pages: _Optional[int] = ..., last_hash: _Optional[int] = ..., skip_pages: _Optional[int] = ..., backends: _Optional[_Iterable[str]] = ...) -> None: ...

class PullAck(_message.Message):
    __slots__ = ("pages",)
    PAGES_FIELD_NUMBER: _ClassVar[int]
    pages: int
    def __init__(self, pages: _Optional[int] = ...) -> None: ...

class PullKvResponse(_message.Message):
    __slots__ = ("accepted", "pages", "end")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    accepted: PullAccepted
    pages: KvPages
    end: PullEnd
    def __init__(self, accepted: _Optional[_Union[PullAccepted, _Mapping]] = ..., pages: _Optional[_Union[KvPages, _Mapping]] = ..., end: _Optional[_Union[PullEnd, _Mapping]] = ...) -> None: ...

class PullAccepted(_message.Message):
    __slots__ = ("backend", "address", "engine_id")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    backend: str
    address: str
    engine_id: str
    def __init__(self, backend: _Optional[str] = ..., address: _Optional[str] = ..., engine_id: _Optional[str] = ...) -> None: ...

class KvPages(_message.Message):
    __slots__ = ("first_page", "count", "payload", "checksum", "more")
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    first_page: int
    count: int
    payload: bytes
    checksum: int
    more: bool
    def __init__(self, first_page: _Optional[int] = ..., count: _Optional[int] = ..., payload: _Optional[bytes] = ..., checksum: _Optional[int] = ..., more: _Optional[bool] = ...) -> None: ...

class PullEnd(_message.Message):
    __slots__ = ("pages",)
    PAGES_FIELD_NUMBER: _ClassVar[int]
    pages: int
    def __init__(self, pages: _Optional[int] = ...) -> None: ...

class AcquireLeaseRequest(_message.Message):
    __slots__ = ("request_id", "token_ids", "cache_namespace", "ttl_ms", "tenant", "deadline_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    cache_namespace: CacheNamespace
    ttl_ms: int
    tenant: str
    deadline_ms: int
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., cache_namespace: _Optional[_Union[CacheNamespace, _Mapping]] = ..., ttl_ms: _Optional[int] = ..., tenant: _Optional[str] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class AcquireLeaseResponse(_message.Message):
    __slots__ = ("grant", "prompt")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    grant: LeaseGrant
    prompt: PromptReport
    def __init__(self, grant: _Optional[_Union[LeaseGrant, _Mapping]] = ..., prompt: _Optional[_Union[PromptReport, _Mapping]] = ...) -> None: ...

class RenewLeaseRequest(_message.Message):
    __slots__ = ("lease_id", "tenant", "ttl_ms")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    tenant: str
    ttl_ms: int
    def __init__(self, lease_id: _Optional[str] = ..., tenant: _Optional[str] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class RenewLeaseResponse(_message.Message):
    __slots__ = ("grant",)
    GRANT_FIELD_NUMBER: _ClassVar[int]
    grant: LeaseGrant
    def __init__(self, grant: _Optional[_Union[LeaseGrant, _Mapping]] = ...) -> None: ...

class ReleaseLeaseRequest(_message.Message):
    __slots__ = ("lease_id", "tenant")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    tenant: str
    def __init__(self, lease_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class ReleaseLeaseResponse(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: bool
    def __init__(self, released: _Optional[bool] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("request_id", "prefix_token_ids", "choices", "cache_namespace", "lease", "deadline_ms", "traceparent")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    CACHE_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prefix_token_ids: _containers.RepeatedScalarFieldContainer[int]
    choices: _containers.RepeatedCompositeFieldContainer[Tokens]
    cache_namespace: CacheNamespace
    lease: Lease
    deadline_ms: int
    traceparent: str
    def __init__(self, request_id: _Optional[str] = ..., prefix_token_ids: _Optional[_Iterable[int]] = ..., choices: _Optional[_Iterable[_Union[Tokens, _Mapping]]] = ..., cache_namespace: _Optional[_Union[CacheNamespace, _Mapping]] = ..., lease: _Optional[_Union[Lease, _Mapping]] = ..., deadline_ms: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("scores", "prompt", "lease")
    SCORES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    scores: _containers.RepeatedCompositeFieldContainer[ChoiceScore]
    prompt: PromptReport
    lease: LeaseReport
    def __init__(self, scores: _Optional[_Iterable[_Union[ChoiceScore, _Mapping]]] = ..., prompt: _Optional[_Union[PromptReport, _Mapping]] = ..., lease: _Optional[_Union[LeaseReport, _Mapping]] = ...) -> None: ...

class ChoiceScore(_message.Message):
    __slots__ = ("sum", "token_logprobs")
    SUM_FIELD_NUMBER: _ClassVar[int]
    TOKEN_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    sum: float
    token_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, sum: _Optional[float] = ..., token_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class GetCacheTreeRequest(_message.Message):
    __slots__ = ("limit", "cursor", "include_token_ids")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    limit: int
    cursor: int
    include_token_ids: bool
    def __init__(self, limit: _Optional[int] = ..., cursor: _Optional[int] = ..., include_token_ids: _Optional[bool] = ...) -> None: ...

class GetCacheTreeResponse(_message.Message):
    __slots__ = ("nodes", "next", "nodes_total", "namespaces_total", "cache")
    NODES_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    NODES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[CacheTreeNode]
    next: int
    nodes_total: int
    namespaces_total: int
    cache: CacheStats
    def __init__(self, nodes: _Optional[_Iterable[_Union[CacheTreeNode, _Mapping]]] = ..., next: _Optional[int] = ..., nodes_total: _Optional[int] = ..., namespaces_total: _Optional[int] = ..., cache: _Optional[_Union[CacheStats, _Mapping]] = ...) -> None: ...

class CacheTreeNode(_message.Message):
    __slots__ = ("node", "parent", "namespace_hash", "pages", "tokens", "depth_tokens", "locks", "leases", "hits", "age_ms", "children", "token_ids", "on_host")
    NODE_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_HASH_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEPTH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ON_HOST_FIELD_NUMBER: _ClassVar[int]
    node: int
    parent: int
    namespace_hash: int
    pages: int
    tokens: int
    depth_tokens: int
    locks: int
    leases: int
    hits: int
    age_ms: int
    children: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    on_host: bool
    def __init__(self, node: _Optional[int] = ..., parent: _Optional[int] = ..., namespace_hash: _Optional[int] = ..., pages: _Optional[int] = ..., tokens: _Optional[int] = ..., depth_tokens: _Optional[int] = ..., locks: _Optional[int] = ..., leases: _Optional[int] = ..., hits: _Optional[int] = ..., age_ms: _Optional[int] = ..., children: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., on_host: _Optional[bool] = ...) -> None: ...

class EmbedRequest(_message.Message):
    __slots__ = ("request_id", "inputs", "task", "dimensions", "deadline_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    inputs: _containers.RepeatedCompositeFieldContainer[EmbedInput]
    task: EmbedTask
    dimensions: int
    deadline_ms: int
    def __init__(self, request_id: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[EmbedInput, _Mapping]]] = ..., task: _Optional[_Union[EmbedTask, str]] = ..., dimensions: _Optional[int] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class EmbedInput(_message.Message):
    __slots__ = ("token_ids", "type_ids")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TYPE_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    type_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., type_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class EmbedResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[EmbedResult]
    def __init__(self, results: _Optional[_Iterable[_Union[EmbedResult, _Mapping]]] = ...) -> None: ...

class EmbedResult(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, values: _Optional[_Iterable[float]] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ("running",)
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    running: int
    def __init__(self, running: _Optional[int] = ...) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters", "version", "limit")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    version: int
    limit: int
    def __init__(self, adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., version: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "path", "digest", "rank", "running")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    digest: str
    rank: int
    running: int
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., digest: _Optional[str] = ..., rank: _Optional[int] = ..., running: _Optional[int] = ...) -> None: ...
