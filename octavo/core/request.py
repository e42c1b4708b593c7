"""What was asked (`Request`, frozen) and how far it is (`Sequence`, owned by the scheduler alone).

Nothing here knows text, tensors, clocks or sockets. A `Request` can only be built valid: its
`SamplingParams` check themselves and name the field that is wrong.
"""

from __future__ import annotations

import reprlib
from array import array
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from enum import Enum, IntEnum, StrEnum
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, NewType, Protocol

from octavo.core.history import Record
from octavo.errors import InvalidRequest

if TYPE_CHECKING:
    from octavo.core.batch import Want

BlockId = NewType("BlockId", int)
BlockHash = NewType("BlockHash", bytes)

MAX_TOP_LOGPROBS = 20
MAX_SLO = 86_400.0
EXPIRED = "expired: its deadline passed before it could be started"
NO_WAY = "no way on: "  # an error that begins so is the request's own doing
NO_DRAFT: array[int] = array("i")


class FinishReason(StrEnum):
    """Why a sequence ended, in the words of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """What the text must be: exactly one of these. Raises `InvalidRequest`.

    json: a JSON schema, as an object or its text. json_object: any JSON object. regex: matches the
    whole text. choice: one of some texts. grammar: Lark or GBNF. strict: False ignores keywords of
    a schema that cannot be enforced; True refuses them. after: it holds from the end of this text
    on; what comes before is free, but that it begins with `first` and does not end the answer.
    param: the field of a request's body that it comes from, to be named in errors.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    strict: bool = True
    after: str = ""
    first: str = ""
    param: str = "structured_outputs"

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, what: str) -> None:
            if not ok:
                value = getattr(self, name)
                told = shown([*value] if isinstance(value, tuple) else value)
                got = f"{name} must be {what}, got {told}"
                raise InvalidRequest(f"{self.param} {got}", self.param)

        need(isinstance(self.json, str | Mapping | None), "json", "a JSON schema")
        need(isinstance(self.regex, str | None), "regex", "a text")
        need(isinstance(self.grammar, str | None), "grammar", "a text")
        need(isinstance(self.json_object, bool), "json_object", "a boolean")
        need(isinstance(self.strict, bool), "strict", "a boolean")
        if self.choice is not None:
            ok = isinstance(self.choice, tuple) and all(isinstance(c, str) for c in self.choice)
            need(ok and bool(self.choice), "choice", "one text or more")
        names = ("json", "regex", "choice", "grammar", "json_object")
        given = [name for name in names if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            got = " and ".join(given) or "none of them"
            what = "takes one of json, json_object, regex, choice, grammar"
            raise InvalidRequest(f"{self.param} {what}, got {got}", self.param)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Raises `InvalidRequest` naming the field.

    max_tokens: None means until a stop token or the end of the context.
    temperature: 0 is greedy (argmax, lowest id wins ties). top_k 0 and top_p, typical_p 1 are off.
    logprobs: None is off; k in 0..20 adds the k most likely alternatives to the chosen token's own.
    seed: None means that the door draws a random 64-bit one and keeps it in the request.
    Penalties: repetition (Keskar et al. 2019, over prompt and output), presence and frequency
    (OpenAI's definition, over output only).
    speculation: whether the engine may guess tokens and check them; None leaves it to the engine.
    prediction: text that the output is expected to resemble, to guess from. No token depends on
    either. structured_outputs: what the text must be. embed: with the one token that is chosen
    (max_tokens says so) the state it was chosen from is wanted, normed, as the head reads it.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    speculation: bool | None = None
    prediction: str | None = None
    structured_outputs: StructuredOutputs | None = None
    embed: bool = False

    def __post_init__(self) -> None:
        def need(ok: bool, param: str, what: str) -> None:
            if not ok:
                got = shown(_first_wrong(param, getattr(self, param)))
                raise InvalidRequest(f"{param} must be {what}, got {got}", param)

        def real(param: str, low: float, high: float, *, open_low: bool = False) -> None:
            value = getattr(self, param)
            # A NaN is in no interval.
            ok = _is_number(value) and (low < value if open_low else low <= value) and value <= high
            need(ok, param, f"a number in {'(' if open_low else '['}{low:g}, {high:g}]")

        def count(param: str, low: int, high: int, *, optional: bool = False) -> None:
            value = getattr(self, param)
            ok = type(value) is int and low <= value <= high
            need(ok or (value is None and optional), param, f"an integer in [{low}, {high}]")

        def each(param: str, fine: Callable[[object], bool], kind: str, what: str) -> None:
            value = getattr(self, param)
            need(isinstance(value, tuple), param, f"a tuple of {kind}")
            need(all(map(fine, value)), param, what)

        count("max_tokens", 1, 2**31 - 1, optional=True)
        real("temperature", 0.0, 100.0)
        count("top_k", 0, 2**31 - 1)
        real("top_p", 0.0, 1.0, open_low=True)
        real("min_p", 0.0, 1.0)
        real("typical_p", 0.0, 1.0, open_low=True)
        real("repetition_penalty", 0.01, 100.0)  # a logit divided by less may be infinite
        real("presence_penalty", -2.0, 2.0)
        real("frequency_penalty", -2.0, 2.0)
        count("min_tokens", 0, 2**31 - 1)
        count("seed", -(2**63), 2**64 - 1, optional=True)
        count("n", 1, 1024)
        count("logprobs", 0, MAX_TOP_LOGPROBS, optional=True)
        count("prompt_logprobs", 0, MAX_TOP_LOGPROBS, optional=True)
        ids = (_is_id, "token ids", "token ids in [0, 2147483647]")
        each("banned_token_ids", *ids)
        each("stop_token_ids", *ids)
        if self.allowed_token_ids is not None:
            each("allowed_token_ids", *ids)
            need(bool(self.allowed_token_ids), "allowed_token_ids", "one token id or more")
        each("logit_bias", _is_bias, "pairs", "(token id, bias in [-100, 100]) pairs")
        each("stop", _is_stop, "texts", "texts of a character or more")
        for param, kind, what in _KINDS:
            need(isinstance(getattr(self, param), kind), param, what)
        need(not self.embed or self.max_tokens == 1, "embed", "False unless max_tokens is 1")


_KINDS: tuple[tuple[str, Any, str], ...] = (
    ("ignore_eos", bool, "a boolean"),
    ("speculation", bool | None, "a boolean or None"),
    ("prediction", str | None, "a text or None"),
    ("structured_outputs", StructuredOutputs | None, "StructuredOutputs or None"),
    ("embed", bool, "a boolean"),
)


def shown(value: object) -> str:
    """A value of a stranger's, short enough for a message."""
    try:
        return reprlib.repr(value)
    except Exception:  # an integer of thousands of digits, an object that cannot show itself
        return f"a {type(value).__name__}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _first_wrong(param: str, value: object) -> object:
    """Of a long list what is wrong in it, or it would be cut off in a message."""
    of = {"logit_bias": _is_bias, "stop": _is_stop}
    fine = of.get(param, _is_id if param.endswith("_ids") else None)
    if fine is None or not isinstance(value, tuple):
        return value
    return next((item for item in value if not fine(item)), value)


def _is_stop(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _is_bias(pair: object) -> bool:
    if not (isinstance(pair, tuple) and len(pair) == 2):
        return False
    token, bias = pair
    in_reach = _is_number(bias) and -100.0 <= bias <= 100.0
    return _is_id(token) and in_reach


class Watcher(Protocol):
    """Looks over the tokens of one sequence: stop strings, grammars. Deterministic.

    Built outside the core, called inside commit (`advance`) and schedule (the others). An exception
    in `advance` or `mask` fails that sequence alone; in the others it means that nothing is known.
    """

    def advance(self, tokens: Seq[int]) -> tuple[int, FinishReason | None]:
        """Take newly chosen tokens; return how many of them are kept and why to stop, if so."""
        ...

    def mask(self, position: int) -> bytes | None:
        """Bit i (little-endian) allows token i at this output position; None allows all.

        Asked for the next position only; asking changes nothing.
        """
        ...

    def ahead(self, draft: Seq[int]) -> Seq[bytes | None]:
        """What `mask` would say after each of some guesses, had they been taken; shorter than
        `draft` where a guess is not allowed or would be the last token. Asking changes nothing."""
        ...

    def forced(self) -> Seq[int]:
        """Tokens that are as good as sure to come next, to guess from. Asking changes nothing."""
        ...


class Forecast(NamedTuple):
    """Predicted seconds from arrival to the first token, and for each further token."""

    ttft: float
    tpot: float


class Tier(IntEnum):
    """How much a request is protected: whose blocks go last, whose promises go first. The words
    are those of `service_tier` in the OpenAI API, but for the last: nobody asks for it, it is what
    the requests of a batch file are served at (`core.offline`)."""

    PRIORITY = 0
    DEFAULT = 1
    FLEX = 2
    BATCH = 3


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request wants of time, in seconds. None: nothing is promised.

    ttft: from arrival to the first token. tpot: (e2e - ttft) / (output tokens - 1). e2e: from
    arrival to the last token; what has not been started by then is dropped unprefilled.
    degrade: whether it would rather be served without promises than be refused.
    """

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None
    degrade: bool = False

    def __post_init__(self) -> None:
        for name in ("ttft", "tpot", "e2e"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0.0 < value <= MAX_SLO):
                what = f"a number of seconds in (0, {MAX_SLO:g}]"
                raise InvalidRequest(f"slo {name} must be {what}, got {shown(value)}", "slo")

    def __bool__(self) -> bool:
        """Whether anything is wanted at all."""
        return not self.ttft is self.tpot is self.e2e is None

    @property
    def deadlines(self) -> tuple[float | None, float | None, float | None]:
        """What is wanted, whatever is to become of it where it cannot be had."""
        return self.ttft, self.tpot, self.e2e


NO_SLO = Slo()


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked; never changes. `prompt` is token ids, never empty.

    stop_ids: every id that ends a sequence (the model's EOS/EOT unless ignore_eos, plus the
    caller's). namespace: seeds the block hashes (model id + weight version + tenant salt), so that
    requests of different namespaces never share KV. seed: 64 bits, drawn at the door if not given.
    watcher: makes a fresh watcher for each choice. priority: lower runs first. prediction: what the
    caller expects the output to be, for a drafter to guess from. slo, tier: what it wants of time,
    and how much that counts. predicted: seconds to its first token and for each further one, as
    forecast when it was admitted; None where nothing was.
    """

    id: str
    prompt: array[int]
    params: SamplingParams
    arrival: float
    seed: int
    stop_ids: frozenset[int] = frozenset()
    priority: int = 0
    tenant: str = ""
    namespace: bytes = b""
    watcher: Callable[[], Watcher] | None = None
    prediction: array[int] | None = None
    slo: Slo = NO_SLO
    tier: Tier = Tier.DEFAULT
    predicted: Forecast | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise InvalidRequest("the prompt has no tokens", "prompt")

    def forecast(self, predicted: Forecast) -> Request:
        """The same with a forecast; `dataclasses.replace` takes four times as long, at every
        door."""
        made: Request = _bare(Request)
        for put, value in zip(_puts, (*_asked(self), predicted), strict=True):
            put(made, value)
        return made


# All that a request is but what was forecast of it, which is the last field; and how a field of one
# that is being made gets its value, which nothing else may give it.
_names = [field.name for field in fields(Request)]
_asked = attrgetter(*_names[:-1])
_puts: tuple[Callable[[Request, object], None], ...] = tuple(
    vars(Request)[name].__set__ for name in _names
)
_bare = object.__new__


class State(Enum):
    """Where a sequence is. HELD: waiting until another has computed the prefix they share."""

    WAITING = "waiting"
    HELD = "held"
    RUNNING = "running"
    ENDED = "ended"


class Sequence:
    """One choice of one request, and how far it is. Only the scheduler writes here.

    tokens: prompt then output. num_computed: tokens whose KV is committed. num_scheduled: tokens
    handed to the executor; num_computed <= num_scheduled <= len(tokens), and in between lies what
    is in flight. draft: guesses in flight that follow num_scheduled. Blocks cover num_scheduled
    tokens and the draft; block_table is replaced when it changes, never changed in place, so rows
    share it. hashes: of the leading full blocks, as far as known.
    scores: prompt logprobs so far, of tokens 1, 2, ... key: rank in the policy's fixed order.
    due: when its next token should be there; pace: seconds from each token's deadline to the next
    one's, nearly so until its first one. late: whether its promise cannot be kept any more. stamp:
    of its latest place in the queue. charged: tokens of it that its tenant has been charged for.
    max_len: tokens (prompt and output) at which it ends by length. stop_from: tokens before which
    no stop id (`suppress`, sorted) may be chosen. penalised: whether choosing looks at the tokens
    before. standing: what each of its rows of one token wants, where that never changes again.
    may_draft: whether guesses are welcome. notes: what the drafter remembers of it.
    num_drafted, num_accepted: guesses made, and those of them that saved a step. record: what
    happened to it.
    """

    __slots__ = (
        "arrival_index",
        "awaits",
        "block_table",
        "charged",
        "choice",
        "draft",
        "due",
        "first_scheduled",
        "first_token",
        "hashes",
        "id",
        "key",
        "late",
        "max_len",
        "may_draft",
        "notes",
        "num_accepted",
        "num_cached",
        "num_computed",
        "num_drafted",
        "num_preemptions",
        "num_prompt",
        "num_scheduled",
        "num_steps",
        "pace",
        "penalised",
        "record",
        "request",
        "scored",
        "scores",
        "stamp",
        "standing",
        "state",
        "stop_from",
        "suppress",
        "tokens",
        "watcher",
    )

    def __init__(self, seq_id: int, request: Request, choice: int, arrival_index: int) -> None:
        self.id = seq_id
        self.request = request
        self.choice = choice
        self.arrival_index = arrival_index
        self.tokens = array("i", request.prompt)
        self.num_prompt = len(request.prompt)
        self.num_computed = 0
        self.num_scheduled = 0
        self.num_cached = 0
        self.num_preemptions = 0
        self.num_steps = 0
        self.num_drafted = 0
        self.num_accepted = 0
        self.record = Record(request.arrival)
        self.first_scheduled: float | None = None
        self.first_token: float | None = None
        self.due = inf
        self.pace = inf
        self.late = False
        self.stamp = 0
        self.charged = 0
        self.block_table: array[int] = array("i")
        self.draft = NO_DRAFT
        self.may_draft = request.params.speculation is not False
        self.notes: object = None
        self.hashes: list[BlockHash] = []
        params = request.params
        self.stop_from = self.num_prompt + params.min_tokens
        # Once: sorting a vocabulary in every step would hold up everybody's.
        self.suppress = tuple(sorted(request.stop_ids)) if params.min_tokens else ()
        self.penalised = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
        # The prompt is the same for all choices: the first one scores it for the others.
        self.scored = choice == 0 and params.prompt_logprobs is not None
        self.scores: list[TokenLogprob] = []
        self.standing: tuple[Want, ...] | None = None
        self.state = State.WAITING
        self.awaits: BlockHash | None = None
        self.key: tuple[float, int] = (request.arrival, arrival_index)
        self.max_len = 2**31 - 1
        self.watcher = request.watcher() if request.watcher is not None else None

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def in_flight(self) -> bool:
        """Whether a batch with tokens of this sequence is outstanding."""
        return self.num_scheduled > self.num_computed


class TokenLogprob(NamedTuple):
    """Log-probability of `token` under the model's own distribution at that position (before
    temperature, penalties and truncation), and of the most likely alternatives, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Event(NamedTuple):
    """News of one choice after a step: the tokens it gained, and how it ended if it did.

    num_drafted, num_accepted: guesses made for it so far, and those that held; they depend on the
    times of steps, so they are no part of what is equal from run to run. embedding: the normed
    state that the token was chosen from, float32, where asked for.
    """

    request_id: str
    choice: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish: FinishReason | None = None
    error: str | None = None
    num_cached: int = 0
    num_preemptions: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    embedding: bytes | None = None
