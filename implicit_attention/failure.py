"""Problems without an answer: errors and warnings, `FailurePolicy`, and the report of failures to the user."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
import warnings
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from . import _validate
from ._torch import along, backward_running, host_may_look, is_batched, transforms_active
from .solution import NO_REMEDIES, UNSURE, Record, Remedies, Status, shown_index


class ConvergenceError(RuntimeError):
    """At least one problem of a solve, or of its adjoint, has no answer; the message counts and locates them.

    Examples:
        >>> import torch
        >>> from implicit_attention import ConvergenceError, equilibrium_attention
        >>> x = 3 * torch.eye(4)
        >>> try:
        ...     equilibrium_attention(x, x, x, max_steps=1, on_failure="raise")
        ... except ConvergenceError as error:
        ...     print(str(error).partition(",")[0])
        Anderson failed for 4 of 4 problems

    Not for arguments that are out of range: these raise ValueError or TypeError.
    """


class ConvergenceWarning(UserWarning):
    """At least one problem has no answer, or an uncertain gradient, with `on_failure="warn"`.

    Examples:
        >>> import warnings, torch
        >>> from implicit_attention import ConvergenceWarning, equilibrium_attention
        >>> x = 3 * torch.eye(4)
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", ConvergenceWarning)
        ...     equilibrium_attention(x, x, x, max_steps=1).shape
        torch.Size([4, 4])

    Not for telling which problems failed: read `Solution.status`, or `last_solve` of a layer.
    """


class UnsupportedImplementation(ValueError):
    """The implementation that `impl` names cannot do what is asked; the message says what can.

    Examples:
        >>> import torch
        >>> from implicit_attention import UnsupportedImplementation, equilibrium_attention
        >>> x = torch.eye(4)
        >>> try:
        ...     equilibrium_attention(x, x, x, impl="triton", max_steps=0)
        ... except UnsupportedImplementation:
        ...     print("not with triton")
        not with triton

    Not for impl="auto", which takes an implementation that can: it is never raised there.
    """


class KernelWarning(RuntimeWarning):
    """A kernel is wrong or fails on this machine and is not used; said once, with what to report."""


def outside() -> int:
    """Stack level of the first caller outside this package and torch, so that a warning points at the user's line."""
    frame, level = sys._getframe(1), 1
    inside = (__name__.partition(".")[0], "torch")
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in inside:
        frame, level = frame.f_back, level + 1  # type: ignore[assignment]
    return level


# Policies, and the sites that count failures.

Word: TypeAlias = Literal["raise", "warn", "ignore"]
WORDS: tuple[Word, ...] = ("raise", "warn", "ignore")
#: The treatment of problems without an answer.
OnFailure: TypeAlias = "Word | FailurePolicy"
#: The kinds of failures that are counted: of solves, of backward solves, and those that a layer finds by itself.
Side: TypeAlias = Literal["forward", "backward", "layer"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FailurePolicy(_validate.Options):
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

    forward: Literal["best", "explicit"] = _validate.choice("best", ("best", "explicit"))
    backward: Literal["keep", "zero"] = _validate.choice("keep", ("keep", "zero"))
    tolerate: float = _validate.number(
        1e-3, low=0, high=1, remedy="it is a share of all problems: 0.01 tolerates one in a hundred"
    )
    window: int = _validate.integer(100, low=1, remedy="1 looks at each call by itself")
    over: Word = _validate.choice("raise", WORDS)
    #: For calls that no layer counts, and for operations in compiled graphs, which take texts. Each policy has its own;
    #: class variables, they are no fields for `dataclasses.asdict` and `replace`.
    _site: ClassVar[FailureSite]
    _text: ClassVar[str]

    def __post_init__(self) -> None:
        super().__post_init__()
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


# Reports.

SHOWN = 3
# The estimate of a gradient's error is of first order: beyond this it says only that the error is large.
UNKNOWN = 0.25
# A layer does not warn of so few doubtful gradients, which any training meets; its `last_solve` counts them.
RARE = FailurePolicy(tolerate=1e-3, window=100, over="warn")
# The kinds of warnings beside statuses: gradients that may be off, and findings of a layer.
_UNSURE_KIND, OTHER_KIND = 100, 101


def check_on_failure(argument: str, on_failure: Any, *, policies: bool = True) -> None:
    """Raise unless it is a word, or a policy where these are known."""
    given, site = located(on_failure)
    if isinstance(given, FailurePolicy):
        # Words only where something is wrong: torch.compile does not follow the making of a text.
        if not policies and site is None:
            required = "be 'raise', 'warn' or 'ignore' here"
            remedy = "a policy is of layers, `solve` and `equilibrium_attention`"
            _validate.refuse(argument, required, repr(given), remedy)
        return
    if isinstance(given, type) and issubclass(given, FailurePolicy):
        received, remedy = "the class FailurePolicy", "pass FailurePolicy()"
        _validate.refuse(argument, "be an instance", received, remedy, TypeError)
    _validate.check_choice(argument, given, WORDS, "or pass a FailurePolicy" if policies else "")


def report_failures(
    on_failure: Any,
    what: str,
    record: Record,
    remedies: Remedies = NO_REMEDIES,
    cause: Callable[[], str] = str,
    *,
    site: FailureSite | None = None,
    side: Side = "forward",
) -> None:
    """Raise or warn if more problems failed than are tolerated, with the remedy of the first, and the `cause`.

    Inside torch.vmap, where the host cannot look, the status itself must be read.
    """
    failed = record.failed

    def message() -> str:
        indices = failed.nonzero()
        first = [tuple(i) for i in indices[:SHOWN].tolist()]
        where = ", ".join(map(shown_index, first)) if first[0] else "the only problem"
        more = ", ..." if len(indices) > SHOWN else ""
        because = f"; {reason}" if (reason := cause()) else ""
        return (
            f"{what} failed for {len(indices)} of {failed.numel()} problems, first at {where}{more}: "
            f"{record.message(first[0], remedies)}{because}"
        )

    tell(on_failure, failed, message, f"{what} is not reliable", site=site, side=side, status=record.status)


def tell(
    on_failure: Any,
    failed: Tensor,
    message: Callable[[], str],
    otherwise: str = "",
    *,
    site: FailureSite | None = None,
    side: Side = "layer",
    status: Tensor | None = None,
    received: str = "the solution",
    but: str = "",
) -> None:
    """Raise or warn if more problems failed than are tolerated, with the `message` on those of this call.

    otherwise: what to say where only calls before this one had failures; nothing if it is empty.
    received: the value that is returned, which an error names.
    but: what follows a warning.
    """
    policy, site = policy_of(on_failure), site or own_site(on_failure)
    if policy.over == "ignore" or is_batched(failed):
        return
    if side == "layer" and backward_running():
        # Checkpointing computes a forward pass again, whose failures were reported before.
        return
    too_many = (site or policy._site).count(side, policy, failed) if policy.counts else ""
    now = too_many is not None and bool(failed.any())
    if not now and not (too_many and otherwise):
        return
    text = message() if now else otherwise
    follows = f"{'.' if now else ':'} {too_many}" if too_many else ""
    if policy.over == "raise":
        remedy = f"Pass on_failure='warn' or 'ignore' to receive {received} all the same."
        raise ConvergenceError(f"{text}{follows}. {remedy}")
    kind = OTHER_KIND if status is None else int(status.max()) if now else int(Status.MAX_STEPS)
    warn_at(site, "forward" if side == "layer" else side, kind, f"{text}{follows}{but}")


def report_gradients(
    on_failure: Any,
    what: str,
    error: Tensor | None,
    record: Record,
    remedies: Remedies = NO_REMEDIES,
    *,
    site: FailureSite | None = None,
) -> None:
    """Report failures of backward solves, and warn of gradients that the residual of the states spoils.

    A layer warns of such gradients where they are not `RARE`, a function each time.
    """
    policy, site = policy_of(on_failure), site or own_site(on_failure)
    if policy.over == "ignore" or is_batched(record.status):
        return
    report_failures(on_failure, what, record, remedies, site=site, side="backward")
    # A policy that tolerates failures says nothing of estimates.
    if error is None or policy.counts:
        return
    unsure = ((error > UNSURE) & ~record.failed).cpu()
    if site is not None and site.count("backward", RARE, unsure) is None:
        return
    if count := int(unsure.sum()):
        worst = float(error[unsure].max())
        share = f"{100 * min(worst, UNKNOWN):.0f} %{' or more' if worst > UNKNOWN else ''}"
        message = (
            f"the gradients of {count} of {unsure.numel()} problems may be off by {share}, as their states are "
            "solved to a residual only and the problems are nearly singular there (a fold; see "
            "`AdjointReport.gradient_error`); solve with a smaller rtol, or in float64"
        )
        warn_at(site, "backward", _UNSURE_KIND, message)


def warn_at(site: FailureSite | None, side: Side, kind: int, message: str) -> None:
    again = "" if site is None else site.again(side, kind)
    if again is not None:
        warnings.warn(f"{message}{again}", ConvergenceWarning, stacklevel=outside())


def without_gradient(on_failure: Any, failed: Tensor, value: Tensor) -> Tensor:
    """The value; with backward="zero" a problem (*lead) that failed gets no gradient by it."""
    # Inside transforms a value that is differentiated at an outer level, or in forward mode, does not say so.
    if policy_of(on_failure).backward == "keep" or not (value.requires_grad or transforms_active()):
        return value
    return torch.where(along(failed, value), value.detach(), value)


def left_out(on_failure: Any, status: Tensor, cotangent: Tensor) -> Tensor | None:
    """With backward="zero" the cotangent (*lead, *event) without failed problems; None where nothing is to be done.

    The host looks, except under transforms. A problem whose cotangent is not finite keeps it.
    """
    if policy_of(on_failure).backward == "keep":
        return None
    failed = forgiven(status, cotangent) > Status.UNSTABLE
    if host_may_look(status) and not bool(failed.any()):
        return None
    return cotangent.masked_fill(along(failed, cotangent), 0.0)


def stays_out(on_failure: Any, answer: Tensor, rhs: Tensor, event_ndim: int) -> Tensor:
    """The answer (*lead, *event) of a linear system; with backward="zero" one that was left out has no derivative.

    Such an answer is 0 for a right-hand side that is not 0, as no solution is.
    """
    if policy_of(on_failure).backward == "keep":
        return answer
    lead = answer.ndim - event_ndim
    left = _everywhere(answer == 0, lead) & ~_everywhere(rhs == 0, lead)
    return torch.where(along(left, answer), answer.detach(), answer)


def lost(status: Tensor, cotangent: Tensor) -> Tensor:
    """(*lead), where the gradient from above is not finite, so that there is no gradient and no solve failed."""
    return ~_everywhere(torch.isfinite(cotangent), status.ndim)


def unread(z: Tensor, cotangent: Tensor, event_ndim: int) -> Tensor:
    """(*lead), where a state is not finite and the loss does not read it.

    It must not reach tensors that problems share: 0 * NaN is NaN. One with a cotangent stays: its solve fails.
    """
    lead = z.ndim - event_ndim
    return ~_everywhere(torch.isfinite(z), lead) & _everywhere(cotangent == 0, lead)


def forgiven(status: Tensor, cotangent: Tensor) -> Tensor:
    """The status of backward solves, of which those whose `cotangent` is `lost` have not failed."""
    return status.masked_fill(lost(status, cotangent), int(Status.CONVERGED))


def _everywhere(holds: Tensor, lead: int) -> Tensor:
    """Whether something holds for all entries of a problem, (*lead, *event) -> (*lead)."""
    return holds.flatten(lead).all(-1) if holds.ndim > lead else holds
