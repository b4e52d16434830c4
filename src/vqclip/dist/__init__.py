"""Communication between processes: the only package that calls torch.distributed.

After `vqclip.nn`; before the losses, quantizers and training loop, which call it. With one process every function is
the identity. The process group is read at each call, so a module may be built before or after `init`. All ranks must
call the same functions in the same order.

**How gradients are scaled.** Every rank computes the full loss over the global batch, so all ranks hold the same
scalar L and each calls `L.backward()`. The backward of a collective returns the *sum* over ranks of the incoming
gradients. All W ranks differentiate the same L, so a rank's own input receives W · dL/dx. DDP then *averages* the
gradients of the parameters over ranks, which divides by W. Together they give the gradient that one process computes on
the whole batch, with equal, unequal and empty batches per rank:

    f = tower(x)                       # this rank's B samples
    F = all_gather(f)                  # (G, E), the same on every rank
    L = loss(F) / G                    # global count G, never B: the same L on every rank
    L.backward()
        all_gather.backward            # sum over ranks of dL/dF, this rank's rows: W · dL/df
        tower.backward                 # W · this rank's part of dL/dw
        DDP                            # mean over ranks: sum of W · parts / W = dL/dw

Two rules follow. Normalise a loss by the *global* count, never by the local one. A parameter that every rank uses in
the loss itself, such as the temperature, needs no collective: DDP's average of W equal gradients is right. `Shards`
averages as DDP does.

Choose the sum by its use:

- `reduce_`: statistics that carry no gradient, in place (it refuses a tensor that requires one).
- `replicated_sum`: all ranks compute the *same* loss from the result. Backward is W times the gradient, without any
  collective, so it cannot hang.

`all_gather` with gradients goes through `torch.distributed.nn.functional.all_gather` before torch 2.15, and through an
autograd function of our own from then on and under `torch.compile`; both give equal values and gradients.

If another rank dies, or a wait exceeds the timeout given to `init`, the collective raises a `DistributedError` with its
name. In the backward of `all_gather` torch raises an error of its own: wrap `loss.backward()` in `named_errors`. (NCCL
checks its timeout in a separate thread, which ends the process with NCCL's message instead.)
"""

from vqclip.dist._collectives import (
    all_gather,
    broadcast_,
    gather_sizes,
    reduce_,
    reduce_scatter,
    replicated_sum,
    start_ring_shift,
)
from vqclip.dist._control import (
    BackgroundGroup,
    any_rank,
    barrier,
    broadcast_json,
    differing_ranks,
    gather_json,
    nodes,
    raise_on_all_ranks,
    ranks_that_see,
    run_on_main,
    shared_seed,
    start_any_rank,
)
from vqclip.dist._state import (
    Collective,
    choose_device,
    exchange_timer,
    init,
    is_distributed,
    is_main,
    launcher_has_died,
    local_rank,
    named_errors,
    rank,
    recent_collectives,
    shutdown,
    signal_at_parent_death,
    stop_with_launcher,
    world_size,
)
from vqclip.dist._torch_versions import is_torch_compiling
from vqclip.dist._weights import (
    Replicas,
    Shards,
    local_rows,
    release_ddp,
    sharded_parameters,
    unwrap_ddp,
    wrap_ddp,
)

__all__ = [
    "BackgroundGroup",
    "Collective",
    "Replicas",
    "Shards",
    "all_gather",
    "any_rank",
    "barrier",
    "broadcast_",
    "broadcast_json",
    "choose_device",
    "differing_ranks",
    "exchange_timer",
    "gather_json",
    "gather_sizes",
    "init",
    "is_distributed",
    "is_main",
    "is_torch_compiling",
    "launcher_has_died",
    "local_rank",
    "local_rows",
    "named_errors",
    "nodes",
    "raise_on_all_ranks",
    "rank",
    "ranks_that_see",
    "recent_collectives",
    "reduce_",
    "reduce_scatter",
    "release_ddp",
    "replicated_sum",
    "run_on_main",
    "sharded_parameters",
    "shared_seed",
    "shutdown",
    "signal_at_parent_death",
    "start_any_rank",
    "start_ring_shift",
    "stop_with_launcher",
    "unwrap_ddp",
    "world_size",
    "wrap_ddp",
]
