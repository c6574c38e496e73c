"""Extensions of the paper's method, with what `sedem calibrate` and training fit for them. Ours.

The paper discards the selector's scores after choosing K blocks, and always answers. Here:

    guided attention   the score of a block biases the attention to it (docs/deviations.md). The
                       bias carries gradient, so the answer loss trains the selector, with or
                       without labels.
    adaptive budgets   softmax(s / tau) determines how many blocks a question needs.
    confidence         a logistic function of two features of s and one of words. If the evidence
                       is missing, the best block matches each question token less well, stands out
                       less from the next ones, and has fewer words of the question.

Queries come from other states than those that W_Q was trained on:

    read once          in the paper, the frozen encoder reads the question to select blocks, and the
                       decoder's own lower layers read it again to answer. The first pass is spared:
                       the queries come from the states at the injection layer, which the answer
                       needs anyway. A product of low rank is added to W_Q for it.
    second hop         it finds blocks that only the first one makes the question lead to. "Where
                       was the founder of Arlo born?" needs the block that names the founder, and
                       then one that the question shares no word with. The encoder reads the best
                       block and then the question again. The question's states now know the block,
                       and queries of another W_Q look for what is left.

Answers may quote the documents. Memory knows which words are meant and loses their spelling; the
text has it:

    spans              where a span of the text may begin and end. The decoder gives each a
                       probability, and a linear score of a few numbers chooses among them.

Letters: B batch, Q question tokens, K selected blocks, N blocks, S spans, F features, E width, R
heads, H width of a head.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile

import torch
from torch import Tensor, nn

from sedem.config import Condition, SedemConfig
from sedem.errors import ConfigError
from sedem.folding import Written, keys_of, terms_of, written
from sedem.method.selector import Selector, is_count

AUTO = "auto"

RIVALS = 7
"""Number of next-best blocks that the best one is compared with. Fixed, so that the features depend
little on the size of a bank and the candidates of a large bank include all of them."""

CONFIDENCE_FEATURES = ("best", "lead", "covered")
UNKNOWN = 0.35
"""The last of them if words do not count: about the mean of questions it was fitted to."""

READ_ONCE_RANK, HOP_RANK = 32, 8
"""Ranks of what is added to W_Q for the decoder's states, and for the second hop."""
HOP_PARTS = ("states", "words", "named")
"""What the scores of a second hop are added to: s_n, BM25 of the question's words, and BM25 of the
words of the first block."""
HOP_WEIGHTS = (0.0, 0.05, 0.05)
"""Weights of `HOP_PARTS` at the start of training."""


class Guidance(nn.Module):
    """Guided attention with a trained temperature.

    All layers share one tau and therefore one bias. The same softmax(s / tau) determines how many
    blocks a question needs (`blocks_for_mass`).

    Args:
        tau: the initial temperature, in units of a score, which is a sum of cosines over question
            tokens.
    """

    def __init__(self, tau: float = 1.0) -> None:
        super().__init__()
        self.log_tau = nn.Parameter(torch.tensor(float(tau)).log())

    @property
    def tau(self) -> Tensor:
        """The temperature, always positive."""
        return self.log_tau.exp()

    def forward(self, scores_BK: Tensor) -> Tensor:
        """(s_n - max s) / tau, added to the attention logits on the states of block n.

        The best block has bias 0, so one selected block is read as in the paper.

        Args:
            scores_BK: s_n of the selected blocks; -inf where there is no block.

        Returns:
            Biases `[B, K]` in float32; 0 where there is no block.
        """
        scores_BK = scores_BK.float()
        if not scores_BK.shape[-1]:
            return scores_BK
        absent_BK = scores_BK == -torch.inf
        best_B1 = scores_BK.amax(-1, keepdim=True)
        # Zeroed before the division: -inf times a gradient of 0 is NaN.
        behind_BK = (scores_BK - best_B1).masked_fill(absent_BK, 0.0)
        return behind_BK / self.tau


def combined_scores(states_N: Tensor | None, words_N: Tensor | None, config: SedemConfig) -> Tensor:
    """s_n + w b_n, what blocks are selected by if words count too. Not in the paper.

    A state score is a sum over question tokens and BM25 a sum over question words, so one weight
    serves short and long questions.

    Args:
        states_N: s_n of every block; -inf for non-candidates, None if states do not count.
        words_N: BM25 of every block, None if words do not count.
    """
    if words_N is None:
        assert states_N is not None
        return states_N
    weighted_N = config.word_weight * words_N
    return weighted_N if states_N is None else states_N + weighted_N


@dataclass(frozen=True)
class Auto:
    """An adaptive budget: the fewest blocks that reach a mass of softmax(s / tau). Extension.

    tau is that of guided attention, so the model needs guidance. `k="auto"` is `Auto()`.

    Attributes:
        mass: the share to reach of the total mass of the `most` best blocks; None means the model's
            `auto_mass`.
        least: the fewest blocks; None means the model's `auto_min`.
        most: the most blocks; None means the model's `auto_max`.

    Raises:
        ConfigError: a value is out of its range, or `least` is more than `most`.
    """

    mass: float | None = None
    least: int | None = None
    most: int | None = None

    def __post_init__(self) -> None:
        if self.mass is not None and not is_share(self.mass):
            raise ConfigError(f"mass is {self.mass!r}; it must be a number from 0 to 1")
        for name, value in (("least", self.least), ("most", self.most)):
            if value is not None and not is_count(value):
                raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 1")
        if self.least is not None and self.most is not None and self.least > self.most:
            raise ConfigError(
                f"least is {self.least} but most {self.most}; the fewest blocks cannot be more "
                "than the most"
            )

    def filled(self, config: SedemConfig) -> tuple[float, int, int]:
        """Mass, fewest and most blocks; the model's values where none is given.

        If only one limit is given, the model's other limit yields to it.
        """
        least = config.auto_min if self.least is None else self.least
        most = config.auto_max if self.most is None else self.most
        if self.least is None:
            least = min(least, most)
        if self.most is None:
            most = max(least, most)
        return config.auto_mass if self.mass is None else self.mass, least, most


Budget = int | str | Auto
"""A number of blocks, "all", "auto" or `Auto`."""


def blocks_for_mass(
    scores_N: Tensor, tau: Tensor | float, mass: float, least: int, most: int
) -> int:
    """The fewest blocks, best first, whose softmax(s / tau) reaches a mass. Not in the paper.

    The softmax is over the `most` best blocks, because only they can be used: guided attention
    weights each of them by the same exp(s / tau), before the decoder's own logits. Over all blocks,
    the shares of very many bad ones would add up, and every question to a large bank would use
    `most`. The limit also makes the count exact where only candidates have scores.

    Args:
        scores_N: s_n of every block; -inf for non-candidates.
        least: the fewest blocks to return, if there are that many.
        most: the most blocks to return.
    """
    best_K = scores_N.double().topk(min(most, len(scores_N))).values
    best_K = best_K[best_K > -torch.inf]
    reached_K = (best_K / torch.as_tensor(tau).to(best_K)).softmax(-1).cumsum(-1)
    count = int((reached_K < mass).sum()) + 1
    return min(max(count, least), len(best_K))


def is_share(value: object) -> bool:
    """Whether a value is a number from 0 to 1."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def text_count(condition: Condition, count: int) -> int:
    """How many of the `count` best blocks the decoder reads as text; the others are memory."""
    return {"memory": 0, "text": count, "both": min(1, count)}[condition]


def confidence_features(
    scores_N: Tensor, question_tokens: int, covered: float | None = None
) -> Tensor:
    """The features of one question.

    A score is a sum of cosines over question tokens, so scores are divided by their count.

    Args:
        scores_N: s_n of every block; -inf for non-candidates.
        covered: share of the question's words in the block that is selected first, by their
            weights; None if words do not count.

    Returns:
        `[F]` in float32: the best score, by how much it exceeds the mean of the next `RIVALS`
        scores, and the share of words. With only one block the lead is 0, because there is nothing
        to compare it with.
    """
    best_N = scores_N.float().topk(min(1 + RIVALS, len(scores_N))).values
    rivals_N = best_N[1:][best_N[1:] > -torch.inf]
    lead = best_N[0] - rivals_N.mean() if len(rivals_N) else torch.zeros_like(best_N[0])
    words = best_N.new_tensor(UNKNOWN if covered is None else covered)
    return torch.stack([best_N[0] / question_tokens, lead / question_tokens, words])


class Confidence(nn.Module):
    """A probability, such as that a bank has the evidence, as a logistic function of features.

    `fit` sets its parameters after training. Before that it returns 0.5.
    """

    def __init__(self, features: int = len(CONFIDENCE_FEATURES)) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(features))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, features_BF: Tensor) -> Tensor:
        """Probabilities `[B]` from features `[B, F]`."""
        return (features_BF.to(self.weight) @ self.weight + self.bias).sigmoid()

    def fit(self, features_BF: Tensor, present_B: Tensor) -> None:
        """Fit the parameters by maximum likelihood.

        Args:
            present_B: whether what it is the probability of was so.
        """
        features_BF, target_B = features_BF.double(), present_B.double()
        # Features of one scale make the problem well conditioned. A small penalty keeps weights
        # finite if the features separate the two classes.
        mean_F, spread_F = features_BF.mean(0), features_BF.std(0).clamp_min(1e-9)
        scaled_BF = (features_BF - mean_F) / spread_F
        weight_F = torch.zeros_like(self.weight, dtype=torch.float64, requires_grad=True)
        bias = torch.zeros((), dtype=torch.float64, requires_grad=True)

        def loss() -> Tensor:
            logits_B = scaled_BF @ weight_F + bias
            value = nn.functional.binary_cross_entropy_with_logits(logits_B, target_B)
            return value + 1e-4 * weight_F.square().sum()

        minimize(loss, [weight_F, bias])
        with torch.no_grad():
            self.weight.copy_(weight_F / spread_F)
            self.bias.copy_(bias - (weight_F * mean_F / spread_F).sum())


def minimize(loss: Callable[[], Tensor], parameters: list[Tensor]) -> None:
    """Set a few parameters in place to where a smooth loss is smallest."""
    optimizer = torch.optim.LBFGS(parameters, max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    optimizer.step(closure)


# Queries from other states


class Queries(nn.Module):
    """W_Q for other states: the selector's, plus a product of low rank.

    Args:
        selector: the selector whose keys the queries are compared with.

    Attributes:
        down, up: the two factors of what is added.
    """

    def __init__(self, selector: Selector, rank: int) -> None:
        super().__init__()
        own = selector.w_query
        self.down = nn.Linear(own.in_features, rank, bias=False)
        self.up = nn.Linear(rank, own.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def queries(self, selector: Selector, hidden_BQE: Tensor) -> Tensor:
        """Queries `[B, Q, R, H]` from the states of question tokens."""
        hidden_BQE = selector.norm_query(hidden_BQE)
        return selector.unit_heads(selector.w_query(hidden_BQE) + self.up(self.down(hidden_BQE)))


class SecondHop(Queries):
    """W_Q of the second hop, and how its scores join those of the first.

    Args:
        selector: the selector whose keys it is compared with, and whose W_Q it begins as.

    Attributes:
        weights: units of its scores that one unit of each of `HOP_PARTS` is worth.
        open: the probability that a question needs a second hop.
    """

    def __init__(self, selector: Selector) -> None:
        super().__init__(selector, HOP_RANK)
        self.weights = nn.Parameter(torch.tensor(HOP_WEIGHTS))
        self.open = Confidence(3)

    def forward(
        self, again_N: Tensor, states_N: Tensor, words_N: Tensor, named_N: Tensor
    ) -> Tensor:
        """What the other blocks are ordered by `[N]`, given their scores and `HOP_PARTS`."""
        states, words, named = self.weights
        return again_N + states * states_N + words * words_N + named * named_N


def reordered(total_N: Tensor, again_N: Tensor, first: int) -> Tensor:
    """What blocks are selected and guided by after a second hop `[N]`.

    The second hop orders the others: the best of them gets the second best total of the first hop,
    and so on. Its scores are not on the scale for which guidance was trained, and that of the first
    block, of whose words its queries were made, would suppress all others.

    Args:
        total_N: what the first hop selects by, best at `first`; -inf for non-candidates.
        again_N: what the second one orders the others by.
    """
    is_other_N = torch.arange(len(total_N)) != first
    others_N = is_other_N.nonzero()[:, 0]
    order_N = others_N[again_N[others_N].argsort(descending=True, stable=True)]
    found_N = total_N.clone()
    found_N[order_N] = total_N[others_N].sort(descending=True).values
    return found_N


def open_features(
    total_N: Tensor, states_N: Tensor, covered: float, question_tokens: int
) -> Tensor:
    """The features of whether a question needs a second hop `[F]`.

    Args:
        total_N: what the first block is selected by; -inf for non-candidates.
        states_N: s_n of the blocks.
        covered: share of the question's words in the first block, by their weights.

    Returns:
        That share, the first block's s_n, and how far the next block is behind it.
    """
    best = total_N.topk(min(2, len(total_N)))
    behind = best.values[0] - best.values[-1]
    state = states_N[best.indices[0]]
    return torch.stack([torch.tensor(covered), state / question_tokens, behind / question_tokens])


# Spans of the text: where they may begin and end, and which one answers

SPAN_FEATURES = ("likelihood", "mean", "length", "block", "words")
"""The numbers by which spans are compared; see `span_features`."""
SECOND_FEATURES = (*SPAN_FEATURES, "gap", "memory likelihood", "memory mean")
"""The same where both memory and text were read; see `second_features`."""

_AFTER = re.compile(r"[%‰°)\]]*")
_WHOLE = re.compile(
    r"[^\s<>()\[\]{}\"',;:]+@[\w-]+(?:\.[\w-]+)+"
    r"|(?:https?://|www\.)[^\s<>()\"']*[^\s<>()\"'.,;:!?]"
    r"|(?<![\w\"])\d+(?:[.,/]\d+)*[\"\u2032\u2033](?!\w)"
)
"""Addresses, and lengths in inches and feet."""
_NUMBER = (
    r"(?<![^\W_])[$€£+\u2212-]?\d+(?:(?:[.,:'\u2019\u00a0\u2009\u202f]| (?=\d{3}\b))\d+){0,5}"
    r"(?:[a-z]{1,3}\b|[ \u00a0]?[%‰€°]C?)?"
)
_AMOUNT = rf"(?!(?:1[5-9]|20)\d\d\b(?![.,:]\d)){_NUMBER}"
_CODE = rf"(?:{_NUMBER}|(?<![^\W_])[A-Z\d]+)"
_DASH = "-\u2010-\u2015\u2212"
_TOGETHER = re.compile(
    rf"(?=[A-Z/{_DASH}]{{0,20}}[$€£]?\d){_CODE}(?:[{_DASH}/]{_CODE})+(?![^\W_])"
    rf"|{_AMOUNT}\s[{_DASH}]\s{_AMOUNT}"
)
"""Codes, dates and ranges: "V-77", "2026-11-29", "1998/99", "60 - 70"."""
_RANGE = re.compile(
    r"\b(?:from|between|von|vom|zwischen|de|du|des|dal?|dalle|del|desde|entre|tra|fra)\s"
    rf"(?P<first>{_AMOUNT}\.?(?:\s[^\W\d][\w.]*)?)"
    r"\s(?:to|and|until|till|through|bis|auf|und|à|au|aux|et|a|al|alle|y|hasta|e)\s"
    rf"{_AMOUNT}"
    rf"|(?P<bare>{_AMOUNT})\s(?:to|bis|à|a)\s{_AMOUNT}(?![\d,])",
    re.IGNORECASE,
)
"""Ranges and changes in words: "from 45 euros to 52", "60 to 70". Years of a range may be asked for
alone, and two numbers before a comma rather belong to a list."""
LEAST = -4.0
"""Least log-probability of a token that counts. If memory has lost the spelling of a name, one of
its tokens seems all but impossible."""
GAP = 3.0
"""The usual `SpanScorer.gap`."""
NO_GAIN = 0.003
"""Loss of mean token F1, from 0 to 1, that is no reason to read again."""
STEM = 4
"""Fewest letters that two forms of a word share."""
ENDING = 3
"""Most letters in which two forms of a word differ at the end."""


def borders_of(
    text: str, words: Sequence[tuple[int, int]]
) -> tuple[list[tuple[int, int]], set[int]]:
    """Return the words that a span may begin with, and where it may end.

    It ends after a word, or after signs that belong to it. Addresses, lengths, codes and ranges are
    not divided: 20" is not 20, unless the sign closes what is quoted on its line, and "60-70" is
    not 60.
    """
    ends = {end for _, end in words}
    ends |= {found.end() for end in ends if (found := _AFTER.match(text, end)) is not None}
    inside = set[int]()
    for found in chain.from_iterable(one.finditer(text) for one in (_WHOLE, _TOGETHER)):
        start, end = found.span()
        if found[0].endswith('"') and text.count('"', text.rfind("\n", 0, start) + 1, start) % 2:
            continue
        ends.add(end)
        inside.update(range(start + 1, end))
    # A hyphen is no minus.
    words = [
        (start + (text[start] in "-\u2212+" and text[start - 1 : start].isalnum()), end)
        for start, end in words
    ]
    return [word for word in words if word[0] not in inside], ends - inside


def with_range(text: str, at: int, end: int) -> tuple[int, int]:
    """Return a span with the whole range or change in words that it divides.

    The fee that rises "from 45 to 52" is neither 45 nor 52. A model prefers one of them, so the
    search compares these, and the answer shows all.
    """
    for found in _RANGE.finditer(text):
        first, last = max(found.start("first"), found.start("bare")), found.end()
        if first < end and at < last and (first < at or end < last):
            return min(at, found.start()), max(end, last)
    return at, end


@dataclass(frozen=True)
class Match:
    """A word of a text that is one of the question, with its weight, such as its rarity."""

    start: int
    end: int
    word: str
    weight: float


def matches_of(text: str, question: Mapping[str, float]) -> list[Match]:
    """Find the words of a question in a text.

    Args:
        question: the weight of each word.
    """
    terms = terms_of(text)
    found = []
    for word, weight in question.items():
        keys, whole = keys_of(word)
        same = {term.key: same_stem(keys[0], term.key) for term in terms} if len(keys) == 1 else {}
        for number, term in enumerate(terms):
            last = terms[min(number + len(keys), len(terms)) - 1]
            if same.get(term.key) or (term.key == whole):
                found.append(Match(term.start, term.end, word, weight))
            elif len(keys) > 1 and keys == [one.key for one in terms[number : number + len(keys)]]:
                found.append(Match(term.start, last.end, word, weight))
    return sorted(found, key=lambda match: match.start)


def total_weight(matches: Iterable[Match]) -> float:
    """Return the weight of all words that match, each counted once."""
    return sum({one.word: one.weight for one in matches}.values())


def unsupported(answer: str, sources: Iterable[str]) -> tuple[str, ...]:
    """Return what an answer says that stands in none of its sources.

    These are its longer words, its names and its numbers. Names and numbers side by side must also
    stand side by side in a source, in any order: "Novak Olsen" is not made of two people.

    Args:
        sources: texts that the answer may take its words from, among them the question.
    """
    read = [(text, list(written(text))) for text in sources]
    own = {term.key for text, _ in read for term in terms_of(text)}
    words = [(answer[one.start : one.end], one) for one in written(answer)]
    missing = dict[str, None]()
    for word, one in words:
        # A name or a number is checked as it is, a longer word in any form.
        terms, exact = {term.key for term in one.terms}, is_exact(word)
        if (not exact and len(word) < STEM) or word.casefold() in ("yes", "no"):
            continue
        if one.whole in own or terms <= own:
            continue
        if exact or not all(any(same_stem(term, other) for other in own) for term in terms):
            missing[word] = None
    # A name goes on after spaces, a hyphen or the full stop of an initial.
    names: list[list[Written]] = []
    last = None
    for word, one in words:
        if not is_exact(word) or word in missing:
            last = None
            continue
        if last is not None and not answer[last : one.start].strip(" .-"):
            names[-1].append(one)
        else:
            names.append([one])
        last = one.end
    # The first word may have its capital for standing there.
    if names and names[0][0] is words[0][1]:
        plain = words[0][0].lower()
        is_plain = any(plain == text[o.start : o.end] for text, own in read for o in own)
        names[0] = names[0][plain != words[0][0] and is_plain :]
    for name in names:
        keys = sorted(term.key for one in name for term in one.terms)
        rows = [[term.key for one in own for term in one.terms] for _, own in read]
        if len(name) > 1 and not any(
            keys == sorted(row[at : at + len(keys)]) for row in rows for at in range(len(row))
        ):
            missing[answer[name[0].start : name[-1].end]] = None
    return tuple(missing)


def is_exact(word: str) -> bool:
    """Whether a word is a name or a number, which has only one form."""
    return word[0].isupper() or any(character.isdigit() for character in word)


def same_stem(first: str, second: str) -> bool:
    """Whether two words are the same but for their endings, in any language with endings."""
    if first == second or any(map(str.isdigit, first)):
        return first == second
    shared = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    )
    return shared >= max(STEM, max(len(first), len(second)) - ENDING)


def span_features(
    likelihood_S: Tensor,
    tokens_S: Tensor,
    behind_S: Tensor,
    words_S: Tensor,
) -> Tensor:
    """The features of spans `[S, F]`.

    Args:
        likelihood_S: log-probability of a span's tokens and of the end after them.
        tokens_S: number of its tokens.
        behind_S: how far its block's score is behind the best one's, per question token.
        words_S: share of the question's words in the rest of its sentence, by their weights.
    """
    mean_S, length_S = likelihood_S / (tokens_S + 1), tokens_S.log()
    return torch.stack([likelihood_S, mean_S, length_S, behind_S, words_S], -1)


def second_features(features_SF: Tensor, gap_S: Tensor, memory_S: Tensor) -> Tensor:
    """The features of spans that were read as text and in memory `[S, F]`.

    Args:
        features_SF: `span_features` by the text.
        gap_S: how far the first token is behind the likeliest one, by the text.
        memory_S: log-probability by memory; NaN if memory has not read a span, which then counts as
            the least likely of the others.
    """
    tokens_S = features_SF[:, SPAN_FEATURES.index("length")].exp() + 1
    mean_S = memory_S / tokens_S
    least = mean_S[~mean_S.isnan()].amin() if (~mean_S.isnan()).any() else LEAST
    mean_S = mean_S.where(~mean_S.isnan(), least)
    return torch.cat([features_SF, torch.stack([gap_S, mean_S * tokens_S, mean_S], -1)], -1)


class SpanScorer(nn.Module):
    """A linear score of spans. Before `fit`, it is the log-probability.

    Args:
        features: the names of the numbers by which it compares them.

    Attributes:
        gap: `auto` decodes freely if the likeliest first token has a log-probability that is higher
            by more than this than that of the best span. Then the answer, such as "no", seems to
            need words that the text does not have.
        certainty: the probability that the best span is right.
    """

    def __init__(self, features: Sequence[str] = SPAN_FEATURES) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(len(features)))
        self.gap = nn.Parameter(torch.tensor(GAP))
        self.certainty = Confidence(2)
        with torch.no_grad():
            self.weight[SPAN_FEATURES.index("likelihood")] = 1.0

    def forward(self, features_SF: Tensor) -> Tensor:
        """Scores `[S]`, whose softmax is the probability that a span is the answer."""
        return features_SF.to(self.weight) @ self.weight

    def best(self, features_SF: Tensor) -> tuple[int, Tensor]:
        """Return the best span, and the two features of its certainty.

        These are the logarithm of its share of the softmax over all spans, and its mean
        log-probability.
        """
        features_SF = features_SF.to(self.weight)
        log_S = self(features_SF).log_softmax(-1)
        best = int(log_S.argmax())
        return best, torch.stack([log_S[best], features_SF[best, SPAN_FEATURES.index("mean")]])

    def fit(self, questions: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Fit the weights by maximum likelihood.

        Args:
            questions: features `[S, F]` of a question's spans, and how right each is `[S]`, from 0
                to 1.
        """
        spread_F = torch.cat([features_SF for features_SF, _ in questions]).double().std(0)
        spread_F = spread_F.clamp_min(1e-9)  # a feature may be the same everywhere
        rows = [(f.double() / spread_F, right_S.double()) for f, right_S in questions]
        weight_F = torch.zeros(len(self.weight), dtype=torch.float64, requires_grad=True)
        used_F = torch.ones_like(weight_F, requires_grad=False)

        def loss() -> Tensor:
            right = [
                (features_SF @ (used_F * weight_F)).softmax(0) @ right_S
                for features_SF, right_S in rows
            ]
            value = -torch.stack(right).clamp_min(1e-9).log().mean()
            # A small penalty keeps weights finite if a feature separates right spans from wrong.
            return value + 1e-2 * weight_F.square().sum()

        minimize(loss, [weight_F])
        # Among the few blocks of these questions, a lower score may seem better by chance. Among
        # many it would draw answers to blocks that have nothing to do with the question.
        if weight_F[SPAN_FEATURES.index("block")] < 0:
            used_F[SPAN_FEATURES.index("block")] = 0
            minimize(loss, [weight_F])
        with torch.no_grad():
            self.weight.copy_(used_F * weight_F / spread_F)

    def fit_gap(self, gaps: Sequence[float], spans: Sequence[float], free: Sequence[float]) -> None:
        """Choose the middle of the gaps with which the answers of some questions are best.

        Among so few questions the best one is chance, so gaps within a standard error of it count.

        Args:
            gaps: how far the first token of each best span is behind the likeliest one.
            spans: how right each best span is.
            free: how right the answer is that is decoded freely.
        """
        gaps_B, spans_B, free_B = (torch.tensor([*row]) for row in (gaps, spans, free))
        tried_G = torch.tensor([GAP, *gaps])
        right_GB = torch.where(gaps_B > tried_G[:, None], free_B, spans_B)
        behind_GB = right_GB[right_GB.mean(1).argmax()] - right_GB
        error_G = behind_GB.std(1) / len(gaps) ** 0.5
        alike_G = tried_G[behind_GB.mean(1) <= error_G]
        with torch.no_grad():
            self.gap.fill_((alike_G.min() + alike_G.max()) / 2)


class SecondReading(SpanScorer):
    """What decides once the sentences of the best spans were read again as text.

    Attributes:
        sure: the share of memory's best span from which nothing is read again.
        freely: the probability that the free answer is better than the best span.
        free_certainty: the probability that it is right. Features: see `rival_features`.
    """

    def __init__(self) -> None:
        super().__init__(SECOND_FEATURES)
        self.sure = nn.Parameter(torch.tensor(1.0))
        self.freely = Confidence(3)
        self.free_certainty = Confidence(3)

    def fit_sure(
        self, shares: Sequence[float], memory: Sequence[float], text: Sequence[float]
    ) -> None:
        """Choose the lowest share with which answers are about as good as with the best one.

        Args:
            shares: shares of memory's best spans.
            memory: how right these are.
            text: how right the answers are after a second reading.
        """
        shares_B, memory_B, text_B = (torch.tensor([*row]) for row in (shares, memory, text))
        tried_G = torch.tensor([1.0, *shares])
        right_G = torch.where(shares_B >= tried_G[:, None], memory_B, text_B).mean(1)
        with torch.no_grad():
            self.sure.copy_(tried_G[right_G >= right_G.max() - NO_GAIN].min())


def rival_features(gap: float, lead: float, share: float) -> Tensor:
    """The features by which a free answer is compared with the best span `[F]`.

    Args:
        gap: how far the span's first token is behind the likeliest one, in log-probability.
        lead: by how much the free answer is likelier, in log-probability.
        share: the span's share of the softmax over all spans.
    """
    return torch.tensor([gap, lead, math.log(max(share, 1e-9))])
