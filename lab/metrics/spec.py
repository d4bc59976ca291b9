"""What drafts came to: the `spec` section of metrics.json. Torch-free.

The expected speed-up is that of Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding"
(2023): with a draft accepted with probability alpha when those before it were, gamma drafts bring (1 - alpha^(gamma + 1)) /
(1 - alpha) tokens a verification. Of a tree gamma is the depth, and alpha the probability that one of the siblings is accepted.
What a verification costs is not taken to be one plain step, it is measured, where the run had plain steps enough.
"""

from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from lab.metrics.summary import distribution


def expected_tokens(alpha: float, gamma: float) -> float:
    """Tokens of one verification of `gamma` drafts, the one that follows them included."""
    return 1.0 + gamma if alpha >= 1.0 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


@dataclass(slots=True)
class DraftTotals:
    """Adds up what became of drafts: one `add` per row that had drafts to verify."""

    num_drafts: int = 0  # rows that brought drafts
    draft_tokens: int = 0
    accepted_tokens: int = 0
    num_refused: int = 0  # rows whose drafts went further than was accepted
    depth: int = 0  # sum of the most drafts that could be accepted
    offered: Counter[int] = field(default_factory=Counter)  # position -> rows with drafts that reached it
    accepted: Counter[int] = field(default_factory=Counter)  # position -> rows with a draft accepted there

    def add(self, num_drafts: int, num_accepted: int, depth: int | None = None) -> None:
        """A row's drafts; `depth` is that of a tree, None for a chain of them. The positions of a tree are its depths."""
        if not num_drafts:
            return
        depth = num_drafts if depth is None else depth
        self.depth += depth
        self.num_drafts += 1
        self.draft_tokens += num_drafts
        self.accepted_tokens += num_accepted
        self.num_refused += num_accepted < depth
        self.offered.update(range(depth))
        self.accepted.update(range(num_accepted))

    def add_line(self, line: Mapping[str, Any]) -> None:
        """One line of requests.jsonl. Drafts after the token that ended the request count neither way."""
        names = ("tokens_per_step", "drafts_per_step", "accepted_per_step", "draft_depth_per_step")
        for num_tokens, num_drafts, num_accepted, depth in zip(*(line[name] for name in names), strict=True):
            if num_tokens > num_accepted:
                self.add(num_drafts, num_accepted, depth)
            else:
                self.add(num_accepted, num_accepted)

    @property
    def alpha(self) -> float:
        """The probability that a draft is accepted when those before it were, as if it were the same at every position."""
        return self.accepted_tokens / (self.accepted_tokens + self.num_refused)

    def metrics(self) -> dict[str, Any] | None:
        """None without drafts. `mean_accepted_length` counts the token that follows the drafts."""
        if not self.num_drafts:
            return None
        return {
            "num_drafts": self.num_drafts,
            "draft_tokens": self.draft_tokens,
            "accepted_tokens": self.accepted_tokens,
            "acceptance_rate": self.accepted_tokens / self.draft_tokens,
            "acceptance_per_position": [self.accepted[i] / self.offered[i] for i in sorted(self.offered)],
            "mean_accepted_length": 1 + self.accepted_tokens / self.num_drafts,
            "alpha": self.alpha,
            "gamma": self.depth / self.num_drafts,
        }


@dataclass(slots=True)
class CategoryTotals:
    """The requests of one category."""

    drafts: DraftTotals = field(default_factory=DraftTotals)
    num_requests: int = 0
    later_tokens: int = 0  # after each request's first step
    later_steps: int = 0
    later_ms: float = 0.0

    def add(self, line: Mapping[str, Any]) -> None:
        self.num_requests += 1
        self.drafts.add_line(line)
        self.later_tokens += sum(line["tokens_per_step"][1:])
        self.later_steps += len(line["tokens_per_step"][1:])
        self.later_ms += sum(line["itl_ms"])

    def metrics(self) -> dict[str, Any]:
        found: dict[str, Any] = {"num_requests": self.num_requests}
        if self.later_tokens:
            found["tokens_per_step"] = self.later_tokens / self.later_steps
            found["ms_per_token"] = self.later_ms / self.later_tokens
        return found | (self.drafts.metrics() or {})


@dataclass(slots=True)
class RequestDrafts:
    """Adds up the lines of requests.jsonl: all of them, by category, and what single requests came to."""

    all: DraftTotals = field(default_factory=DraftTotals)
    categories: dict[str, CategoryTotals] = field(default_factory=lambda: defaultdict(CategoryTotals))
    acceptance_rates: array = field(default_factory=lambda: array("d"))
    mean_lengths: array = field(default_factory=lambda: array("d"))

    def add(self, lines: Sequence[Mapping[str, Any]]) -> None:
        for line in lines:
            if line["error"]:
                continue
            its = DraftTotals()
            its.add_line(line)
            self.all.add_line(line)
            if its.num_drafts:
                self.acceptance_rates.append(its.accepted_tokens / its.draft_tokens)
                self.mean_lengths.append(1 + its.accepted_tokens / its.num_drafts)
            if line.get("category") is not None:
                self.categories[line["category"]].add(line)

    def metrics(self) -> dict[str, Any] | None:
        """The part of the `spec` section that requests tell; None when no drafts were verified."""
        found = self.all.metrics()
        if found is None:
            return None
        found["per_request"] = {
            "acceptance_rate": distribution(self.acceptance_rates),
            "mean_accepted_length": distribution(self.mean_lengths),
        }
        return found

    def category_metrics(self) -> dict[str, Any]:
        """Of each category; empty when requests have none."""
        return {name: totals.metrics() for name, totals in sorted(self.categories.items())}


LEAST_PLAIN_STEPS = 5  # fewer say nothing of what a step without drafts takes


@dataclass(slots=True)
class _Drafting:
    """Decode steps with drafts, of one number of requests."""

    ms: dict[int, array] = field(default_factory=lambda: defaultdict(lambda: array("d")))  # by drafts; proposing not counted
    count: int = 0
    draft_ms: float = 0.0
    num_drafting: int = 0
    depth: int = 0
    num_accepted: int = 0

    def add(self, line: Mapping[str, Any]) -> None:
        self.ms[line["num_drafts"]].append(line["ms"] - line["draft_ms"])
        self.count += 1
        self.draft_ms += line["draft_ms"]
        self.num_drafting += line["num_drafting"]
        self.depth += line["draft_depth"]
        self.num_accepted += line["num_accepted"]

    @property
    def typical_ms(self) -> float:
        """What they take in all, each the median of its size: a step that something held up does not count as one."""
        return sum(len(ms) * median(ms) for ms in self.ms.values())


@dataclass(slots=True)
class SpecTimes:
    """Adds up the lines of steps.jsonl: where the time of speculation goes, and what it brings.

    Steps with drafts are compared with those without, of as many requests, that the same run had between them.
    """

    ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    plain: dict[int, array] = field(default_factory=lambda: defaultdict(lambda: array("d")))  # requests -> ms of each step
    drafting: dict[int, _Drafting] = field(default_factory=lambda: defaultdict(_Drafting))

    def add(self, line: Mapping[str, Any]) -> None:
        own_ms = line["ms"] - line["draft_ms"]
        self.ms += line["ms"]
        self.draft_ms += line["draft_ms"]
        self.verify_ms += own_ms if line["num_drafts"] else 0.0
        if line["num_tokens"] != line["num_requests"] + line["num_drafts"]:  # it computes prompts too
            return
        if line["num_drafts"]:
            self.drafting[line["num_requests"]].add(line)
        else:
            self.plain[line["num_requests"]].append(own_ms)

    def metrics(self, alpha: float) -> dict[str, Any]:
        """Shares of the execution time, the steps that there were to compare with, and, where these are enough, the speed-up of
        decoding.
        """
        alike = {num: self.plain[num] for num in self.drafting if num in self.plain}
        found: dict[str, Any] = {
            "draft_ms_share": self.draft_ms / self.ms if self.ms else 0.0,
            "verify_ms_share": self.verify_ms / self.ms if self.ms else 0.0,
            "num_plain_steps": sum(map(len, alike.values())),
        }
        enough = {num: median(ms) for num, ms in alike.items() if len(ms) >= LEAST_PLAIN_STEPS}
        return found | {"speedup": self._speedup(alpha, enough)} if enough else found

    def _speedup(self, alpha: float, plain_ms: Mapping[int, float]) -> dict[str, Any]:
        """`plain_ms` is what a step without drafts takes, for each number of requests that is compared."""
        of_plain = expected = measured = ms = draft_ms = 0.0
        for num, each_ms in plain_ms.items():
            steps = self.drafting[num]
            of_plain += steps.count * each_ms
            ms += steps.typical_ms
            draft_ms += steps.draft_ms
            more = steps.num_drafting * (expected_tokens(alpha, steps.depth / steps.num_drafting) - 1)
            expected += (steps.count + more / num) * each_ms  # the time that plain steps take for as many tokens
            measured += (steps.count + steps.num_accepted / num) * each_ms
        return {
            "expected": expected / (ms + draft_ms),
            "measured": measured / (ms + draft_ms),
            "verify_cost": ms / of_plain,  # of a step with drafts, in plain steps
            "draft_cost": draft_ms / of_plain,
            "num_plain_steps": sum(len(self.plain[num]) for num in plain_ms),
        }
