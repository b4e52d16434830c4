"""Plan of a training step before it runs: memory of a process by part, and bytes of every exchange.

The step itself runs, on tensors without memory (`FakeTensorMode`), as rank 0 of ranks that do not exist
(`vqclip.dist.planned_ranks`): it stores and exchanges what a real step does, whatever tower, quantizer or loss it has.
`Trace` follows the memory of its tensors.
"""

from vqclip.train.planning.plan import Change, Machines, StepPlan, advise, plan_step
from vqclip.train.planning.trace import PARTS, Trace

__all__ = ["PARTS", "Change", "Machines", "StepPlan", "Trace", "advise", "plan_step"]
