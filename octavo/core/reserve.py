"""How many blocks to leave for the growth of what runs: optimistic, and corrected by experience.

Output lengths are unknown, so nobody's maximum is reserved. A newcomer is admitted if its prompt
fits and `rho` times the expected rest of every running output fits beside it. rho follows the
preemptions: each one raises it, each sequence that ends without any lowers it a little, so that it
settles where about one sequence in a hundred is preempted.
"""

from __future__ import annotations

from collections.abc import Collection

from octavo.core.request import Sequence

LEAST = 32.0  # tokens that every running sequence is expected to write still
FOLLOW = 0.05  # weight of the latest output length
UP, DOWN = 0.05, 0.0005
RHO = (0.1, 0.5, 1.0)  # least, first, most
FIRST = 128.0  # tokens of output that are expected before any ended
MAX_TENANTS = 1024


class Reserve:
    """The expected length of outputs (by tenant where known), and how much of it to keep free."""

    def __init__(self) -> None:
        self.rho = RHO[1]
        self._mean = FIRST
        self._by_tenant: dict[str, float] = {}
        self._top = FIRST  # no mean was above it, last we looked
        self._ends = 0

    def expected(self, seq: Sequence) -> float:
        """Tokens that `seq` will still write, probably."""
        mean = self._by_tenant.get(seq.request.tenant, self._mean)
        written = len(seq.tokens) - seq.num_prompt
        return min(max(LEAST, mean - written), float(seq.max_len - len(seq.tokens)))

    def output(self, tenant: str, most: int) -> float:
        """Tokens that a request of this tenant will write, probably, at most `most`."""
        return min(self._by_tenant.get(tenant, self._mean), float(most))

    def growth(self, running: Collection[Sequence], block_size: int) -> float:
        """Blocks to keep free for those that run: of `expected` tokens of each, spelt out, for the
        door asks where blocks are short, and may not take long."""
        means, mean, total = self._by_tenant, self._mean, 0.0
        for seq in running:
            length = len(seq.tokens)
            tokens = means.get(seq.request.tenant, mean) - (length - seq.num_prompt)
            tokens = tokens if tokens > LEAST else LEAST
            most = seq.max_len - length
            total += tokens if tokens < most else most
        return self.rho * total / block_size

    def most_growth(self, running: int, block_size: int) -> float:
        """A bound on `growth` that needs no look at the sequences."""
        return self.rho * running * max(self._top, LEAST) / block_size

    def preempted(self) -> None:
        """Blocks ran out."""
        self.rho = min(RHO[2], self.rho + UP)

    def ended(self, seq: Sequence) -> None:
        """A sequence ended by itself."""
        written, tenant = float(seq.num_output), seq.request.tenant
        self._mean += FOLLOW * (written - self._mean)
        if tenant in self._by_tenant or len(self._by_tenant) < MAX_TENANTS:
            mean = self._by_tenant.get(tenant, self._mean)
            self._by_tenant[tenant] = mean + FOLLOW * (written - mean)
        self._ends += 1
        if self._ends % 64 == 0:
            self._top = max(self._mean, *self._by_tenant.values())
        self._top = max(self._top, self._mean, self._by_tenant.get(tenant, 0.0))
        if not seq.num_preemptions:
            self.rho = max(RHO[0], self.rho - DOWN)
