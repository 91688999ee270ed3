"""`FailurePolicy`, the treatment of problems without an answer, and the sites that count their failures."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter, deque
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from . import _validate

Word: TypeAlias = Literal["raise", "warn", "ignore"]
WORDS: tuple[Word, ...] = ("raise", "warn", "ignore")
#: The kinds of failures that are counted: of solves, of backward solves, and those that a layer finds by itself.
Side: TypeAlias = Literal["forward", "backward", "layer"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FailurePolicy:
    """The treatment of problems without an answer in training: how many are tolerated, and what replaces them.

    With n_i problems in call i of a layer, f_i of them failed, the policy is exceeded where sum f_i > tolerate sum n_i
    over the last `window` calls; while there were fewer calls, n_i of those to come is taken as the mean of those that
    were. Forward and backward solves are counted apart, and so is each layer; calls of a function that are given the
    same policy are counted together. A tolerated failure is silent: `last_solve` and `training.watch` show it.

    Args:
        forward: what stands in for the answer of a failed problem: "best", the state with the smallest residual, or
            "explicit", what `max_steps=0` gives, one step of softmax attention. The second is of attention alone.
        backward: "keep" leaves gradients as they were found; "zero" gives a problem whose forward or backward solve
            failed no part in those through the solve. What is read out there, and the one step of forward="explicit",
            which solves nothing, have their gradients still.
        tolerate: share of failed problems in [0, 1] that is tolerated. 0 tolerates none.
        window: number of calls over which the share is taken, at least 1.
        over: what to do where that is exceeded: "raise", "warn" or "ignore".

    A gradient from above that is NaN or infinite is no failure: a `GradScaler` makes such, and skips the step. It
    stays as it is.

    On a CPU every call is looked at; on an accelerator, for which the host would have to wait, every `window`-th. In a
    compiled graph forward solves are looked at when `last_solve` is asked for; with over="raise" the graph breaks.

    Raises:
        TypeError, ValueError: an argument out of range or of another type.

    Examples:
        >>> import torch
        >>> from implicit_attention import FailurePolicy, ImplicitAttention
        >>> policy = FailurePolicy(forward="explicit", backward="zero", tolerate=0.01, window=50)
        >>> layer = ImplicitAttention(8, heads=2, on_failure=policy)
        >>> layer(torch.randn(1, 5, 8)).shape
        torch.Size([1, 5, 8])

    Not for finding out why solves fail: on_failure="raise" names the first of them.
    """

    forward: Literal["best", "explicit"] = "best"
    backward: Literal["keep", "zero"] = "keep"
    tolerate: float = 1e-3
    window: int = 100
    over: Word = "raise"
    #: For calls that no layer counts, and for operations in compiled graphs, which take texts. Each policy has its own;
    #: class variables, they are no fields for `dataclasses.asdict` and `replace`.
    _site: ClassVar[FailureSite]
    _text: ClassVar[str]

    def __post_init__(self) -> None:
        _validate.store_plain(self)
        _validate.check_choice("forward", self.forward, ("best", "explicit"))
        _validate.check_choice("backward", self.backward, ("keep", "zero"))
        remedy = "it is a share of all problems: 0.01 tolerates one in a hundred"
        _validate.check_number("tolerate", self.tolerate, low=0.0, high=1.0, remedy=remedy)
        _validate.check_integer("window", self.window, low=1, remedy="1 looks at each call by itself")
        _validate.check_choice("over", self.over, WORDS)
        fields = (self.forward, self.backward, repr(float(self.tolerate)), str(self.window), self.over)
        object.__setattr__(self, "_text", " ".join(fields))
        object.__setattr__(self, "_site", FailureSite("policy"))

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies, shallow ones too, and pickles have counted nothing.
        return (functools.partial(type(self), **dataclasses.asdict(self)), ())

    @property
    def counts(self) -> bool:
        """Whether calls without a failure are counted too."""
        return self.over != "ignore" and (self.window > 1 or self.tolerate > 0)


class FailureSite:
    """A place that solves again and again, such as a layer: the failures that it reported, and who watches it.

    Copies and pickles of it are new.
    """

    _numbers: ClassVar = itertools.count(1)
    _all: ClassVar[WeakValueDictionary[int, FailureSite]] = WeakValueDictionary()

    def __init__(self, what: str = "layer") -> None:
        self.what = what
        number = next(self._numbers)
        self._all[number] = self
        #: The same number for operations of a compiled graph, which would be compiled anew for each integer.
        with unset_fake_temporarily(), torch.inference_mode(False):
            self.handle = torch.tensor(number, device="cpu")
        #: The counts of `training.watch`, while it watches.
        self.tally: Any = None
        self._failing_calls: Counter[Side] = Counter()
        self._lines: Counter[Side] = Counter()
        self._kinds: set[tuple[Side, int]] = set()
        #: Failures and problems of the last calls, by side and policy, and the calls that there were.
        self._windows: dict[tuple[Side, FailurePolicy], deque[tuple[Any, int]]] = {}
        self._calls: Counter[tuple[Side, FailurePolicy]] = Counter()

    def __reduce__(self) -> tuple[Any, ...]:
        return (FailureSite, (self.what,))

    @classmethod
    def of(cls, handle: Tensor | None) -> FailureSite | None:
        """The site with this handle, if it still is."""
        return None if handle is None else cls._all.get(int(handle))

    def count(self, side: Side, policy: FailurePolicy, failed: Tensor) -> str | None:
        """Count a call; returns what to say of too many failures in a full window of the policy, else None."""
        window = self._windows.setdefault((side, policy), deque(maxlen=policy.window))
        self._calls[side, policy] += 1
        on_host = failed.device.type == "cpu"
        window.append((int(failed.sum()) if on_host else failed.sum(), failed.numel()))
        if not on_host and self._calls[side, policy] % policy.window:
            return None
        failures, problems = map(sum, zip(*((int(f), n) for f, n in window), strict=True))
        of = problems * (policy.window / len(window))
        if failures <= policy.tolerate * of:
            return None
        calls = "the last call" if policy.window == 1 else f"a window of {policy.window} calls"
        return f"{failures} problems failed in {calls}, more than tolerate={policy.tolerate:g} of {of:.0f}"

    def again(self, side: Side, kind: int) -> str | None:
        """Return the text that follows a warning of this kind; None where the warning is not due.

        A warning is due at the first failing call of a kind, and at the 10th, 100th, ... failing call of the side. A
        kind that comes between skips the next of these: 10,000 failing calls of up to two kinds give five lines.
        """
        count = self._failing_calls[side] = self._failing_calls[side] + 1
        new = (side, kind) not in self._kinds
        self._kinds.add((side, kind))
        if not new and count != 10 ** self._lines[side]:
            return None
        self._lines[side] += 1
        where, following = "" if side == "forward" else " backward", 10 ** self._lines[side]
        return f" (failing{where} call {count} of this {self.what}; the next one to be told of is number {following})"


class Located(NamedTuple):
    """`on_failure` of the solves of a site."""

    on_failure: Word | FailurePolicy
    site: FailureSite


def located(on_failure: Any) -> tuple[Any, FailureSite | None]:
    """The word or policy, and the site if there is one."""
    return on_failure if isinstance(on_failure, Located) else (on_failure, None)


def policy_of(on_failure: Any) -> FailurePolicy:
    """A policy for each word: "raise" and "warn" tolerate nothing."""
    given, _ = located(on_failure)
    return given if isinstance(given, FailurePolicy) else _POLICIES[given]


def own_site(on_failure: Any) -> FailureSite | None:
    """The site at which a policy that is given without one is counted and reported."""
    given, site = located(on_failure)
    return given._site if site is None and isinstance(given, FailurePolicy) else site


def text_of(on_failure: Any) -> str:
    """The word or policy as a text that `of_text` reads."""
    given, _ = located(on_failure)
    return given._text if isinstance(given, FailurePolicy) else given


@functools.cache
def of_text(text: str) -> Any:
    """The word, or the policy of `text_of`: one for each text, which goes on counting."""
    if " " not in text:
        return text
    forward, backward, tolerate, window, over = text.split()
    given: dict[str, Any] = {"forward": forward, "backward": backward, "over": over}
    return FailurePolicy(tolerate=float(tolerate), window=int(window), **given)


#: Policies by their words.
_POLICIES: dict[Word, FailurePolicy] = {word: FailurePolicy(tolerate=0.0, window=1, over=word) for word in WORDS}
