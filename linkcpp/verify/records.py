"""What a verification found."""

from typing import Annotated

from pydantic import Field

from linkcpp.common.records import Record
from linkcpp.dispatch.checks import RowCheck
from linkcpp.worker.agreement import Agreement, Verdict


class VerifyOptions(Record):
    """What to compare: ``token_count`` greedy tokens after each prompt, ``expert_count`` experts
    of every layer of every worker. ``model`` is a whole model, if not the deployment's own.
    """

    prompts: Annotated[tuple[str, ...], Field(min_length=1)]
    token_count: int = Field(default=32, ge=1)
    expert_count: int = Field(default=4, ge=1, le=64)
    model: str | None = None


class TextAgreement(Record):
    """Distributions of the next token in the deployment against those of the reference.

    Both continued the same texts, ``position_count`` tokens in all. ``largest_difference`` is of
    natural log-probabilities of tokens that both tell; ``top1_share`` and ``top8_share`` are how
    many of the best tokens are the same. The divergences are Kullback and Leibler's in nats, from
    the reference, and never more than the true ones, since only the best tokens are told.
    """

    verdict: Verdict
    prompt_count: int
    position_count: int
    equal_count: int
    largest_difference: float
    top1_share: float
    top8_share: float
    mean_divergence: float
    largest_divergence: float


class PromptReport(Record):
    """One prompt: its beginning, its length in tokens, and what was found."""

    beginning: str
    prompt_tokens: int
    agreement: TextAgreement


class WorkerReport(Record):
    """One worker: its checks by layer, and all of them as one.

    ``verdict`` is ``None`` where there was nothing to compare with. ``problem`` says why it is not
    used, or could not be asked.
    """

    name: str
    state: str
    verdict: Verdict | None
    against: tuple[str, ...]
    agreement: Agreement | None
    layer_count: int
    problem: str | None = None
    checks: tuple[RowCheck, ...] = ()


class VerifyReport(Record):
    """Everything. ``text`` is ``None`` where there is no whole model; ``notes`` say what was left
    out and why.
    """

    name: str
    mode: str
    verdict: Verdict
    summary: str
    text: TextAgreement | None
    prompts: tuple[PromptReport, ...]
    workers: tuple[WorkerReport, ...]
    notes: tuple[str, ...] = ()
