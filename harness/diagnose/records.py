"""What the experiments of a diagnosis find, and what follows: the types that its parts share.

Every experiment has a record of its own in the `Dossier`; None there means that it was not made,
and `skipped` says why. Counts are pooled, rates follow from counts. Nothing here is rounded.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from harness.records import DraftCounts

Where = Literal["prefill", "decode"]
Strength = Literal["certain", "likely", "possible", "excluded"]


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """What is diagnosed: a target and a drafter, and how they are served."""

    engine: str
    target: str
    drafter: str
    k: int
    dtype: str = "auto"
    device: str = "cpu"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    temperature: float = 0.0
    tensor_parallel: int = 1
    extra_args: tuple[str, ...] = ()
    extra_env: dict[str, str] = msgspec.field(default_factory=dict)
    kv_cache_gib: float | None = None
    threads: int | None = None
    trust_remote_code: bool = False
    startup_deadline_s: float = 600.0
    url: str | None = None
    run: str | None = None
    trained_target: str | None = None
    """The target that the drafter was trained for, where its owner names another folder."""
    trained_on: str | None = None
    """A folder of the drafter's training samples, where it is there: tells overfitting."""
    dataset: str | None = None
    """Where the prompts come from: a data set's name, or a file; None: not told."""
    prompts: int | None = None

    @property
    def asked(self) -> str:
        """Which prompts are asked, in words; empty where nobody says."""
        count = f"{self.prompts} prompts" if self.prompts is not None else ""
        return f"{count or 'prompts'} of {self.dataset}" if self.dataset is not None else count


class Proportion(msgspec.Struct, frozen=True, kw_only=True):
    """`hits` of `of`, with the 95% interval of whoever counted (by prompt where clustered)."""

    hits: int
    of: int
    low: float | None = None
    high: float | None = None

    @property
    def share(self) -> float | None:
        return self.hits / self.of if self.of else None


class Length(msgspec.Struct, frozen=True, kw_only=True):
    """An acceptance: pooled counts, and the acceptance length with its 95% interval by prompt."""

    counts: DraftCounts
    prompts: int
    length: float | None
    low: float | None = None
    high: float | None = None


class AuditFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One finding of the static audit; `cause` where it points to one of `causes.CAUSES`."""

    severity: Literal["error", "warning", "note"]
    code: str
    what: str
    why: str = ""
    remedy: str = ""
    where: str = ""
    cause: str | None = None


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint, the arguments and the engine's log, read without running anything."""

    findings: tuple[AuditFinding, ...]
    log_facts: dict[str, str] = msgspec.field(default_factory=dict)
    """What the engine said: layers used, embeddings and head shared, method, fallbacks."""
    owns_embeddings: bool | None = None
    owns_lm_head: bool | None = None
    embeddings_like_target: float | None = None
    """Median cosine of the drafter's own embedding rows with the target's."""
    aux_layers: tuple[int, ...] | None = None
    """As the checkpoint states them, in transformers' index."""
    engine_layers: tuple[int, ...] | None = None
    """As this engine reads that checkpoint, in transformers' index."""


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """The paper check: the drafter as its checkpoint says, walked over the target's own text."""

    acceptance: Length
    proof: float
    """Share of the text's tokens that are the argmax of the states they were walked over."""
    outside_vocabulary: Proportion | None = None
    """Tokens of the text that the draft vocabulary lacks: what no drafter of it can propose."""
    without_vocabulary_loss: Length | None = None
    """The same walk, a token outside the vocabulary counted as right: what vocabulary costs."""
    break_even: float | None = None
    """The acceptance length below which speculation loses, at the measured step cost."""
    degenerate_share: float | None = None
    """Answers that loop or repeat, of all."""
    prompt_surprise: float | None = None
    """Mean -log p of the prompts' tokens by the target, over the logarithm of its vocabulary:
    tokens drawn at random have 1 or more, text that it can read far less."""


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine accepted on the same prompts, by its own word."""

    acceptance: Length
    temperature: float
    concurrency: int
    first_step: Proportion | None = None
    """First drafts after a prefill that were accepted at position 0."""
    later_steps: Proportion | None = None
    by_position: tuple[Proportion, ...] = ()
    """Position-0 acceptance by the text's position, in equal parts from the beginning."""
    by_time: tuple[Proportion, ...] = ()
    """The same by order of the calls, in equal parts."""
    by_category: dict[str, Length] = msgspec.field(default_factory=dict)
    identical: Proportion | None = None
    """Greedy answers equal to the target's own, token for token."""
    counted_otherwise: DraftCounts | None = None
    """What the trace counts, where that is not what the engine's counters say."""
    untraced: int | None = None
    """Answers whose trace is missing or ends before they do; None where nothing was traced."""
    in_run: Length | None = None
    """What the stored run that is diagnosed was accepted, on its own prompts and at its load."""


class TargetParity(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the engine computes the target: against the reference engine on the same tokens."""

    prompt_gap: float | None
    """Median |difference| of log-probabilities on given text (prefill), nats."""
    decode_gap: float | None
    """The same on generated text as the engine scored it while decoding."""
    rescored_gap: float | None
    """Generated text scored again as a prompt by the same engine, against its decoding."""
    argmax: Proportion | None
    """Generated tokens that are the reference's argmax, of those that are no near-tie."""
    floor: float | None = None
    """The gap of two honest computations here (types, kernels), where it is known."""
    overruled: Proportion | None = None
    """Tokens that the target chose itself in its greedy answers: of all, those behind the
    reference's choice by more than any rounding of this type explains."""


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """How well one candidate explains one aux slot's rows."""

    candidate: str
    """`hidden[i]` (transformers' index), `normed[i]`, `branch[i]` (layer i's own addition),
    `embedding`, with `@+1` or `@-1` behind it for a shift along the text (`@-1`: the state of the
    token before), `other request`, `previous step`, `partial[i]` (hidden[i] without a part of the
    last addition in it). `hidden[L]`, L the number of layers: the last state without its norm."""
    cosine: float
    scale: float
    """Median of the rows' norm over the candidate's."""


class SlotFit(msgspec.Struct, frozen=True, kw_only=True):
    """One aux slot in one place: what it should hold, and what it holds."""

    slot: int
    where: Where
    batched: bool
    rows: int
    declared: str
    best: Fit
    as_declared: Fit
    zero_share: float
    bad_share: float
    """Rows that are not the declared state, of all (cosine and norm outside the floor)."""
    fits: tuple[Fit, ...]
    """Of the bad rows alone where there are any, as `best` and `as_declared` are."""


class States(msgspec.Struct, frozen=True, kw_only=True):
    """What the drafter was handed, beside the reference's states of the same tokens."""

    slots: tuple[SlotFit, ...]
    matrix_rows: tuple[str, ...] = ()
    """Slots, as told on the page."""
    matrix_columns: tuple[str, ...] = ()
    matrix: tuple[tuple[float, ...], ...] = ()
    """Median cosine of each slot's rows with each candidate, [slots][candidates]."""
    bad_by_step: dict[str, Proportion] = msgspec.field(default_factory=dict)
    """Bad rows by `prefill`, `first decode`, `later decode`, `batch 1`, `batched`, `reused prefix`,
    `early`, `late`: where the fault lives."""
    floor: float = 0.999
    """Cosine that honest arithmetic of this engine's type reaches."""


class ReadingFit(msgspec.Struct, frozen=True, kw_only=True):
    """How well one reading of the drafter predicts something.

    A reading is a way to run the drafter (`readings.READINGS`): as its checkpoint says, or with one
    thing otherwise. `agreement`: proposals equal to the engine's. `acceptance`: over the text.
    `explains`: of the calls whose proposals the checkpoint's own reading does not all give, those
    whose proposals this one does: a fault in some calls only is as clear there as one in all.
    """

    reading: str
    agreement: Proportion | None = None
    explains: Proportion | None = None
    beaten: Proportion | None = None
    """Of those calls that either this reading gives or the one that explains the most, and not
    both: those of the other. None for that one itself."""
    by_draft: tuple[Proportion, ...] = ()
    acceptance: Length | None = None
    gain: float | None = None
    """Acceptance length over the checkpoint's own reading, paired by prompt."""
    gain_low: float | None = None
    gain_high: float | None = None
    loss: float | None = None
    """Mean -log q of the text's tokens by the first draft step, nats; finer than acceptance."""
    loss_less: float | None = None
    """By how much that is less than the checkpoint's own reading's, paired by prompt."""
    loss_less_low: float | None = None
    loss_less_high: float | None = None


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """The drafter in float32 on the engine's own states and tokens, beside its proposals.

    Says what the engine did: `readings`, the best first, are held against the engine's proposals.
    """

    readings: tuple[ReadingFit, ...]
    on_engine_states: Length
    """What the drafter, rightly executed, would have been accepted on the states it was handed."""
    proposals: Length
    """What the engine's own proposals would have been accepted with a right verification."""
    first_call: Proportion | None = None
    """Agreement of the first draft of the first call after a prefill, as declared."""
    later_calls: Proportion | None = None
    alone: Proportion | None = None
    """At batch 1, and in batches."""
    batched: Proportion | None = None
    by_position: tuple[Proportion, ...] = ()
    verified: Proportion | None = None
    """Greedy: steps whose accepted count is what the target's own tokens make of the drafts."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What the drafter was trained for: readings held against the target's text, the best first."""

    readings: tuple[ReadingFit, ...]
    unnormed_head: Proportion | None = None
    """First drafts that are the argmax of the head over the last state WITHOUT its norm, where this
    is not the target's token: how a drafter draws that was trained towards such targets."""
    unnormed_less: float | None = None
    """By how much the first drafts are nearer to the target's distributions WITHOUT the final norm
    than to its own: the difference of the mean Kullback-Leibler divergences, nats a token."""
    unnormed_less_low: float | None = None
    """The lower end of its 95% interval, paired by prompt."""
    without_tokens: Proportion | None = None
    """First drafts that are right, and stay so where the drafter is fed other tokens."""
    without_states: Proportion | None = None
    """The same where it is handed another text's states."""
    by_step: tuple[Proportion, ...] = ()
    """Conditional acceptance by draft position over all slots of the text, as declared."""
    own_tokens_by_step: tuple[Proportion, ...] = ()
    """The same where an earlier own draft was wrong: right nevertheless. None at the first."""
    trained: Length | None = None
    """On the drafter's training samples, where they are there."""
    other_target: Length | None = None
    """On `Subject.trained_target`, where one is named."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Acceptance at a temperature beside what the two distributions imply on the same text."""

    temperature: float
    observed: Length
    implied_sampled: float | None
    """Acceptance length by sum(min(p, q)): drafts drawn from the drafter's distribution."""
    implied_greedy: float | None
    """By p(argmax q): drafts that are the drafter's likeliest."""
    implied_low: float | None = None
    implied_high: float | None = None
    drafts_are_argmax: Proportion | None = None


class Toggle(msgspec.Struct, frozen=True, kw_only=True):
    """One A/B on the engine: `what` was set to `a`, then to `b`."""

    what: str
    a: str
    b: str
    length_a: Length
    length_b: Length
    verdict: Literal["a", "b", "same", "undecided"]
    cause: str | None = None


class Controls(msgspec.Struct, frozen=True, kw_only=True):
    """What working and broken look like on this engine."""

    repeated_text: Length | None = None
    """A text that repeats itself: a working drafter is accepted nearly always there."""
    shuffled_drafter: Length | None = None
    foreign_states: Length | None = None


class Dossier(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known. None: not made (yet); `skipped` says why it cannot be."""

    subject: Subject
    audit: Audit | None = None
    expected: Expected | None = None
    observed: Observed | None = None
    target: TargetParity | None = None
    states: States | None = None
    replay: Replay | None = None
    wanted: Wanted | None = None
    sampling: Sampling | None = None
    toggles: tuple[Toggle, ...] = ()
    controls: Controls | None = None
    skipped: dict[str, str] = msgspec.field(default_factory=dict)
    needless: tuple[str, ...] = ()
    """Those of `skipped` that could have changed nothing."""
    took_s: dict[str, float] = msgspec.field(default_factory=dict)


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of evidence as it bears on one cause. `weight`: log-likelihood ratio, + for it."""

    cause: str
    weight: float
    says: str
    experiment: str


class Ranked(msgspec.Struct, frozen=True, kw_only=True):
    """One cause as the verdict ranks it."""

    cause: str
    title: str
    strength: Strength
    score: float
    evidence_for: tuple[str, ...]
    evidence_against: tuple[str, ...]
    undecided: tuple[str, ...] = ()
    """What was looked at and could not tell: it bears neither way."""
    settles: str | None = None
    """The experiment that would settle it next."""
    remedy: str = ""
    details: dict[str, str] = msgspec.field(default_factory=dict)
    """What the remedy needs: ids, flags, names of tensors."""


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the waterfall: acceptance length before and after, and what took it.

    `error`: half of the 95% interval of `lost`; None for two walks over one text, which differ by
    nothing else. `steps`: verify steps that the length is of.
    """

    name: str
    length: float
    lost: float | None
    error: float | None = None
    steps: int | None = None

    @property
    def sure(self) -> bool:
        """Whether what is lost is more than its error."""
        return self.lost is not None and (self.error is None or abs(self.lost) > self.error)


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict. `cause` is "none", "unknown" or the first of `ranked`."""

    verdict: str
    cause: str
    stage: str | None
    """Where the fault lies if no cause is named: between which two stages."""
    collapse: bool
    ranked: tuple[Ranked, ...]
    waterfall: tuple[Share, ...]
    next_experiments: tuple[str, ...] = ()
    mending: tuple[str, ...] = ()
    """What `--fix` did, in lines; empty where it was not asked for."""
    schema: str = "1.0"
