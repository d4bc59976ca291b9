"""A suffix automaton that grows by tokens and counts: which texts occurred, how often, and what followed them.

The online construction is that of Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985): a state
stands for the texts that end at the same places, and its link for the longest end of them that ends at more places. A token
costs a few steps on average, a state some 100 bytes; there are at most two states a token.

Counts go up along the links of each new state, at most MOST_COUNTED of them: a text of one token repeated has as many as it is
long, and there only the longest matter.
"""

from array import array

MOST_COUNTED = 16
ROOT = 0


class SuffixAutomaton:
    """All texts that were added, with a cursor at the end of the last one."""

    def __init__(self) -> None:
        self.last = ROOT  # the state of the text so far
        self.num_tokens = 0
        self._length = array("i", [0])  # of the longest text of a state
        self._link = array("i", [-1])
        self._count = array("i", [0])  # times that its texts occurred
        # Most states are followed by one token ever: that one stands in arrays, further ones in a dictionary.
        self._token = array("i", [-1])
        self._next = array("i", [-1])
        self._more: dict[int, dict[int, int]] = {}

    def begin(self) -> None:
        """What is added from here on is another text: it does not follow what was added before."""
        self.last = ROOT

    def add(self, token: int) -> None:
        """The text goes on with this token."""
        link, length = self._link, self._length
        tokens, nexts = self._token, self._next
        before = self.last
        self.num_tokens += 1
        known = self._follow(before, token)
        if known >= 0:  # in another text it has been here
            self.last = known if length[known] == length[before] + 1 else self._split(before, token, known)
        else:
            self.last = new = self._state(length[before] + 1)
            state = before
            while state >= 0:
                if tokens[state] < 0:  # nothing followed: the usual case, and the one that must be fast
                    tokens[state], nexts[state] = token, new
                elif (known := self._follow(state, token)) >= 0:
                    break
                else:
                    self._more.setdefault(state, {})[token] = new
                state = link[state]
            if state >= 0:
                link[new] = known if length[known] == length[state] + 1 else self._split(state, token, known)
            else:
                link[new] = ROOT
        count, state = self._count, self.last
        for _ in range(MOST_COUNTED):
            if state <= ROOT:
                return
            count[state] += 1
            state = link[state]

    def context(self) -> tuple[int, int]:
        """The longest end of the text that occurred before: its state and its length. (ROOT, 0) when there is none."""
        state = self._link[self.last]
        return (state, self._length[state]) if state > ROOT else (ROOT, 0)

    def step(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """The longest end of a text that is known here, when the one before the token was `state`, of `matched` tokens."""
        state = self.settled(state, matched)
        known = self._follow(state, token)
        while known < 0 and state != ROOT:
            state = self._link[state]
            matched = self._length[state]
            known = self._follow(state, token)
        return (known, matched + 1) if known >= 0 else (ROOT, 0)

    def settled(self, state: int, matched: int) -> int:
        """Where a text of `matched` tokens, found in this state earlier, is by now: states split as texts are added."""
        link, length = self._link, self._length
        while state > ROOT and matched <= length[link[state]]:
            state = link[state]
        return state

    def shorter(self, state: int) -> tuple[int, int]:
        """The longest end of a state's text that ended at more places, and its length."""
        state = self._link[state]
        return (state, self._length[state]) if state > ROOT else (ROOT, 0)

    def likeliest(self, state: int) -> tuple[int, int, float]:
        """What followed the state's text most often, and first among equals: the token, its state, its share; -1 if nothing."""
        count, token, following = self._count, self._token[state], self._next[state]
        if token < 0:
            return -1, -1, 0.0
        best = total = count[following]
        more = self._more.get(state)
        if more is not None:
            for other, its in more.items():
                times = count[its]
                total += times
                if times > best:
                    token, following, best = other, its, times
        return token, following, best / total

    def _follow(self, state: int, token: int) -> int:
        if self._token[state] == token:
            return self._next[state]
        more = self._more.get(state)
        return more.get(token, -1) if more is not None else -1

    def _state(self, length: int) -> int:
        self._length.append(length)
        self._link.append(-1)
        self._count.append(0)
        self._token.append(-1)
        self._next.append(-1)
        return len(self._length) - 1

    def _split(self, state: int, token: int, known: int) -> int:
        """A state of its own for those texts of `known` that now end at more places than its longest ones."""
        link, length = self._link, self._length
        copy = self._state(length[state] + 1)
        link[copy], self._count[copy] = link[known], self._count[known]
        self._token[copy], self._next[copy] = self._token[known], self._next[known]
        if known in self._more:
            self._more[copy] = dict(self._more[known])
        while state >= 0 and self._follow(state, token) == known:
            if self._token[state] == token:
                self._next[state] = copy
            else:
                self._more[state][token] = copy
            state = link[state]
        link[known] = copy
        return copy
