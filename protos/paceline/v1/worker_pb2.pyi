from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Rule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RULE_UNSPECIFIED: _ClassVar[Rule]
    RULE_COUPLED: _ClassVar[Rule]
    RULE_REJECTION: _ClassVar[Rule]

class Schedule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCHEDULE_UNSPECIFIED: _ClassVar[Schedule]
    SCHEDULE_TRIE: _ClassVar[Schedule]
    SCHEDULE_SEQUENTIAL: _ClassVar[Schedule]
    SCHEDULE_PARALLEL: _ClassVar[Schedule]

class Source(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SOURCE_UNSPECIFIED: _ClassVar[Source]
    SOURCE_DRAFT: _ClassVar[Source]
    SOURCE_LOOKUP: _ClassVar[Source]
    SOURCE_PREDICTION: _ClassVar[Source]
    SOURCE_GRAMMAR: _ClassVar[Source]
    SOURCE_SUFFIX: _ClassVar[Source]
    SOURCE_EAGLE: _ClassVar[Source]

class FeatureFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FEATURE_FORMAT_UNSPECIFIED: _ClassVar[FeatureFormat]
    FEATURE_FORMAT_BF16: _ClassVar[FeatureFormat]
    FEATURE_FORMAT_FP8: _ClassVar[FeatureFormat]

class Finish(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_UNSPECIFIED: _ClassVar[Finish]
    FINISH_STOP: _ClassVar[Finish]
    FINISH_LENGTH: _ClassVar[Finish]

class Code(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CODE_UNSPECIFIED: _ClassVar[Code]
    CODE_INVALID: _ClassVar[Code]
    CODE_OVERLOADED: _ClassVar[Code]
    CODE_UNKNOWN_SESSION: _ClassVar[Code]
    CODE_DRAINING: _ClassVar[Code]
    CODE_INTERNAL: _ClassVar[Code]
RULE_UNSPECIFIED: Rule
RULE_COUPLED: Rule
RULE_REJECTION: Rule
SCHEDULE_UNSPECIFIED: Schedule
SCHEDULE_TRIE: Schedule
SCHEDULE_SEQUENTIAL: Schedule
SCHEDULE_PARALLEL: Schedule
SOURCE_UNSPECIFIED: Source
SOURCE_DRAFT: Source
SOURCE_LOOKUP: Source
SOURCE_PREDICTION: Source
SOURCE_GRAMMAR: Source
SOURCE_SUFFIX: Source
SOURCE_EAGLE: Source
FEATURE_FORMAT_UNSPECIFIED: FeatureFormat
FEATURE_FORMAT_BF16: FeatureFormat
FEATURE_FORMAT_FP8: FeatureFormat
FINISH_UNSPECIFIED: Finish
FINISH_STOP: Finish
FINISH_LENGTH: Finish
CODE_UNSPECIFIED: Code
CODE_INVALID: Code
CODE_OVERLOADED: Code
CODE_UNKNOWN_SESSION: Code
CODE_DRAINING: Code
CODE_INTERNAL: Code

class Frame(_message.Message):
    __slots__ = ("messages", "ping", "pong")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedScalarFieldContainer[bytes]
    ping: int
    pong: int
    def __init__(self, messages: _Optional[_Iterable[bytes]] = ..., ping: _Optional[int] = ..., pong: _Optional[int] = ...) -> None: ...

class ToWorker(_message.Message):
    __slots__ = ("open", "propose", "verified", "close", "subscribe", "features")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PROPOSE_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBE_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    open: Open
    propose: Proposal
    verified: Verification
    close: Close
    subscribe: Subscribe
    features: Features
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., propose: _Optional[_Union[Proposal, _Mapping]] = ..., verified: _Optional[_Union[Verification, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ..., subscribe: _Optional[_Union[Subscribe, _Mapping]] = ..., features: _Optional[_Union[Features, _Mapping]] = ...) -> None: ...

class FromWorker(_message.Message):
    __slots__ = ("welcome", "verified", "proposed", "refused", "load", "features", "loading")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    verified: Verification
    proposed: Proposal
    refused: Refused
    load: Load
    features: Features
    loading: Loading
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., verified: _Optional[_Union[Verification, _Mapping]] = ..., proposed: _Optional[_Union[Proposal, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., features: _Optional[_Union[Features, _Mapping]] = ..., loading: _Optional[_Union[Loading, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("role", "model", "vocabulary", "context", "tokenizer", "instance", "dtype", "source", "no_speculation", "revision", "started", "sources", "exactness", "head", "features")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NO_SPECULATION_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    role: str
    model: str
    vocabulary: int
    context: int
    tokenizer: int
    instance: str
    dtype: str
    source: str
    no_speculation: bool
    revision: int
    started: float
    sources: _containers.RepeatedScalarFieldContainer[str]
    exactness: str
    head: int
    features: FeatureFormat
    def __init__(self, role: _Optional[str] = ..., model: _Optional[str] = ..., vocabulary: _Optional[int] = ..., context: _Optional[int] = ..., tokenizer: _Optional[int] = ..., instance: _Optional[str] = ..., dtype: _Optional[str] = ..., source: _Optional[str] = ..., no_speculation: _Optional[bool] = ..., revision: _Optional[int] = ..., started: _Optional[float] = ..., sources: _Optional[_Iterable[str]] = ..., exactness: _Optional[str] = ..., head: _Optional[int] = ..., features: _Optional[_Union[FeatureFormat, str]] = ...) -> None: ...

class Loading(_message.Message):
    __slots__ = ("doing", "fraction", "model")
    DOING_FIELD_NUMBER: _ClassVar[int]
    FRACTION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    doing: str
    fraction: float
    model: str
    def __init__(self, doing: _Optional[str] = ..., fraction: _Optional[float] = ..., model: _Optional[str] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("session", "epoch", "tokens", "sampling", "limits", "speculation", "priority", "age_ms", "request", "trace", "prompt", "grammar", "prediction", "logprobs", "prompt_logprobs", "scope", "not_remembered", "cache_salt", "digest")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    NOT_REMEMBERED_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    session: int
    epoch: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    limits: Limits
    speculation: Speculation
    priority: int
    age_ms: int
    request: str
    trace: str
    prompt: int
    grammar: str
    prediction: _containers.RepeatedScalarFieldContainer[int]
    logprobs: int
    prompt_logprobs: int
    scope: str
    not_remembered: bool
    cache_salt: str
    digest: int
    def __init__(self, session: _Optional[int] = ..., epoch: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., speculation: _Optional[_Union[Speculation, _Mapping]] = ..., priority: _Optional[int] = ..., age_ms: _Optional[int] = ..., request: _Optional[str] = ..., trace: _Optional[str] = ..., prompt: _Optional[int] = ..., grammar: _Optional[str] = ..., prediction: _Optional[_Iterable[int]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., scope: _Optional[str] = ..., not_remembered: _Optional[bool] = ..., cache_salt: _Optional[str] = ..., digest: _Optional[int] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "bias_tokens", "bias_values", "allowed", "banned")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_FIELD_NUMBER: _ClassVar[int]
    BANNED_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    bias_tokens: _containers.RepeatedScalarFieldContainer[int]
    bias_values: _containers.RepeatedScalarFieldContainer[float]
    allowed: _containers.RepeatedScalarFieldContainer[int]
    banned: _containers.RepeatedCompositeFieldContainer[TokenList]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., bias_tokens: _Optional[_Iterable[int]] = ..., bias_values: _Optional[_Iterable[float]] = ..., allowed: _Optional[_Iterable[int]] = ..., banned: _Optional[_Iterable[_Union[TokenList, _Mapping]]] = ...) -> None: ...

class TokenList(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("end", "stop_tokens", "min_end")
    END_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_END_FIELD_NUMBER: _ClassVar[int]
    end: int
    stop_tokens: _containers.RepeatedScalarFieldContainer[int]
    min_end: int
    def __init__(self, end: _Optional[int] = ..., stop_tokens: _Optional[_Iterable[int]] = ..., min_end: _Optional[int] = ...) -> None: ...

class Speculation(_message.Message):
    __slots__ = ("enabled", "max_depth", "rule", "schedule", "sources", "all_but", "named")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    ALL_BUT_FIELD_NUMBER: _ClassVar[int]
    NAMED_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    max_depth: int
    rule: Rule
    schedule: Schedule
    sources: _containers.RepeatedScalarFieldContainer[Source]
    all_but: bool
    named: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, enabled: _Optional[bool] = ..., max_depth: _Optional[int] = ..., rule: _Optional[_Union[Rule, str]] = ..., schedule: _Optional[_Union[Schedule, str]] = ..., sources: _Optional[_Iterable[_Union[Source, str]]] = ..., all_but: _Optional[bool] = ..., named: _Optional[_Iterable[str]] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ("session", "epoch")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    session: int
    epoch: int
    def __init__(self, session: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("session", "epoch", "anchor_position", "anchor_digest", "tokens", "parents", "confidence", "source", "q", "took_us")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_POSITION_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    Q_FIELD_NUMBER: _ClassVar[int]
    TOOK_US_FIELD_NUMBER: _ClassVar[int]
    session: int
    epoch: int
    anchor_position: int
    anchor_digest: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    confidence: bytes
    source: Source
    q: _containers.RepeatedCompositeFieldContainer[Support]
    took_us: int
    def __init__(self, session: _Optional[int] = ..., epoch: _Optional[int] = ..., anchor_position: _Optional[int] = ..., anchor_digest: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., confidence: _Optional[bytes] = ..., source: _Optional[_Union[Source, str]] = ..., q: _Optional[_Iterable[_Union[Support, _Mapping]]] = ..., took_us: _Optional[int] = ...) -> None: ...

class Support(_message.Message):
    __slots__ = ("tokens", "weights")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    weights: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., weights: _Optional[_Iterable[int]] = ...) -> None: ...

class Verification(_message.Message):
    __slots__ = ("session", "epoch", "position", "tokens", "digest", "accepted", "offered", "finish", "lead", "cached", "logprobs", "prompt_logprobs", "sources", "took_us", "waited_us", "refused", "recovered", "named")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    OFFERED_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    LEAD_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    TOOK_US_FIELD_NUMBER: _ClassVar[int]
    WAITED_US_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    RECOVERED_FIELD_NUMBER: _ClassVar[int]
    NAMED_FIELD_NUMBER: _ClassVar[int]
    session: int
    epoch: int
    position: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    digest: int
    accepted: int
    offered: int
    finish: Finish
    lead: int
    cached: int
    logprobs: _containers.RepeatedCompositeFieldContainer[Logprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[Logprobs]
    sources: _containers.RepeatedScalarFieldContainer[Source]
    took_us: int
    waited_us: int
    refused: _containers.RepeatedScalarFieldContainer[Source]
    recovered: bool
    named: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session: _Optional[int] = ..., epoch: _Optional[int] = ..., position: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., digest: _Optional[int] = ..., accepted: _Optional[int] = ..., offered: _Optional[int] = ..., finish: _Optional[_Union[Finish, str]] = ..., lead: _Optional[int] = ..., cached: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[Logprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[Logprobs, _Mapping]]] = ..., sources: _Optional[_Iterable[_Union[Source, str]]] = ..., took_us: _Optional[int] = ..., waited_us: _Optional[int] = ..., refused: _Optional[_Iterable[_Union[Source, str]]] = ..., recovered: _Optional[bool] = ..., named: _Optional[_Iterable[str]] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("chosen", "tokens", "logprobs")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    chosen: float
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, chosen: _Optional[float] = ..., tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Subscribe(_message.Message):
    __slots__ = ("session", "epoch", "head", "format")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    session: int
    epoch: int
    head: int
    format: FeatureFormat
    def __init__(self, session: _Optional[int] = ..., epoch: _Optional[int] = ..., head: _Optional[int] = ..., format: _Optional[_Union[FeatureFormat, str]] = ...) -> None: ...

class Features(_message.Message):
    __slots__ = ("session", "epoch", "position", "head", "format", "width", "values", "scales")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    SCALES_FIELD_NUMBER: _ClassVar[int]
    session: int
    epoch: int
    position: int
    head: int
    format: FeatureFormat
    width: int
    values: bytes
    scales: bytes
    def __init__(self, session: _Optional[int] = ..., epoch: _Optional[int] = ..., position: _Optional[int] = ..., head: _Optional[int] = ..., format: _Optional[_Union[FeatureFormat, str]] = ..., width: _Optional[int] = ..., values: _Optional[bytes] = ..., scales: _Optional[bytes] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("session", "epoch", "code", "message")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    session: int
    epoch: int
    code: Code
    message: str
    def __init__(self, session: _Optional[int] = ..., epoch: _Optional[int] = ..., code: _Optional[_Union[Code, str]] = ..., message: _Optional[str] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("sessions", "waiting", "free_tokens", "capacity_tokens", "draining", "counters", "counter_names")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    FREE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    COUNTER_NAMES_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    waiting: int
    free_tokens: int
    capacity_tokens: int
    draining: bool
    counters: _containers.RepeatedScalarFieldContainer[int]
    counter_names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, sessions: _Optional[int] = ..., waiting: _Optional[int] = ..., free_tokens: _Optional[int] = ..., capacity_tokens: _Optional[int] = ..., draining: _Optional[bool] = ..., counters: _Optional[_Iterable[int]] = ..., counter_names: _Optional[_Iterable[str]] = ...) -> None: ...
