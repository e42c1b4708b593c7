"""What the benches that time single steps have in common: a model, a plan, the machine's ceilings.

`kernels`, `step`, `scaling` and `octavo lab phases` are such instruments.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from octavo import ceilings as machine
from octavo.assembly import Assembly
from octavo.benchmark.kernels import Again, Watch
from octavo.ceilings import Ceilings, reread
from octavo.config import EngineConfig
from octavo.neighbours import Neighbours
from octavo.terminal import loaded, note

Plan = TypeVar("Plan", contravariant=True)


class Instrument(Protocol[Plan]):
    """Runs a plan on a loaded model, and reports plain values, each beside its ceiling.

    watch: told what is being measured. again: measures the memory anew around each case; the
    better of the two counts.
    """

    def __call__(
        self,
        assembly: Assembly,
        plan: Plan,
        ceilings: Ceilings,
        watch: Watch = lambda _: None,
        again: Again = reread,
    ) -> dict[str, Any]: ...


def use(
    instrument: Instrument[Plan], plan: Plan, config: EngineConfig, quiet: bool
) -> dict[str, Any]:
    """Load the model, measure the machine, then run the instrument. In its report also what others
    used of the machine meanwhile."""
    llm = loaded(config, quiet)
    note("measuring the machine", quiet)
    around = Neighbours()
    ceilings = machine.measure_ceilings(llm.config.threads, llm.config.isa)
    report = instrument(llm.assembly, plan, ceilings, lambda what: note(what, quiet))
    return report | {"neighbours": around.share()}
