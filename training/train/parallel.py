"""One process or many: the device, DDP and FSDP2, and sums over all processes.

Many are started by `torchrun`. Gradients are of sums over slots, and are divided by the number of
slots of all processes together: processes may have unequal shares of a batch.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import msgspec
import torch
from torch import Tensor, nn

from drafters.eagle3 import Eagle3Drafter

T = TypeVar("T")


class World(msgspec.Struct, frozen=True, kw_only=True):
    """This process among all."""

    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.rank == 0


@contextmanager
def enter() -> Iterator[World]:
    """Join the processes that `torchrun` started; alone without it. CUDA where there is any."""
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if size == 1:
        yield World(rank=0, size=1, device=device)
        return
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield World(rank=rank, size=size, device=device)
    finally:
        torch.distributed.destroy_process_group()


def total(values: Sequence[float], world: World) -> list[float]:
    """Sums over all processes, in double precision."""
    if world.size == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=world.device)
    torch.distributed.all_reduce(tensor)
    return tensor.tolist()


def barrier(world: World) -> None:
    """Wait for all processes."""
    if world.size > 1:
        torch.distributed.barrier()


def from_first(value: T, world: World) -> T:
    """The first process's value, for all."""
    if world.size == 1:
        return value
    box: list[Any] = [value]
    torch.distributed.broadcast_object_list(box, src=0, device=world.device)
    return box[0]


class _Work(nn.Module):
    """Gives work on the drafter a `forward`, on which DDP and FSDP hang what they do."""

    def __init__(self, drafter: Eagle3Drafter) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(self, work: Callable[[Eagle3Drafter], T]) -> T:
        return work(self.drafter)


class Replica:
    """The drafter as this process holds it: whole (alone, DDP) or a shard of it (FSDP2)."""

    def __init__(self, drafter: Eagle3Drafter, world: World, how: Literal["ddp", "fsdp"]) -> None:
        self.drafter, self.world = drafter.to(world.device), world
        self.kind = how if world.size > 1 else None
        self.module: Any = _Work(self.drafter)
        if self.kind == "ddp":
            self.module = nn.parallel.DistributedDataParallel(
                self.module, gradient_as_bucket_view=True, **_no_buffers()
            )
        elif self.kind == "fsdp":
            self._shard()

    def _shard(self) -> None:
        """Weights, gradients and optimizer state by shards; frozen tensors stay whole.

        One layer is all there is, so that the whole drafter is gathered at once for an update, in
        float32: norms and sums are then those of a single process.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        frozen = {p for p in self.drafter.parameters() if not p.requires_grad}
        fully_shard(
            self.module,
            mesh=init_device_mesh(self.world.device.type, (self.world.size,)),
            reshard_after_forward=False,
            ignored_params=frozen,
        )

    def run(self, work: Callable[[Eagle3Drafter], T], *, last: bool) -> T:
        """Do `work` on the drafter; gradients are summed over processes after the `last` only."""
        if self.kind == "fsdp":
            # processes may have unequal numbers of rows: gather once and scatter once an update
            self.module.set_requires_gradient_sync(last)
            self.module.set_reshard_after_backward(last)
        elif self.kind == "ddp" and not last:
            with self.module.no_sync():
                result: T = self.module(work)
                return result
        answer: T = self.module(work)
        return answer

    def look(self, work: Callable[[Eagle3Drafter], T]) -> T:
        """Do `work` without gradients; after `gather` only where processes differ in their work."""
        with torch.no_grad():
            module = self.module.module if self.kind == "ddp" else self.module
            result: T = module(work)
            return result

    def gather(self) -> None:
        """Have the whole weights at hand in every process, at one and the same moment."""
        if self.kind == "fsdp":
            self.module.unshard()

    def release(self) -> None:
        """Undo `gather`."""
        if self.kind == "fsdp":
            self.module.reshard()

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """The trained parameters under their names in a checkpoint."""
        return [(n, p) for n, p in self.drafter.named_parameters() if p.requires_grad]

    def whole(self) -> Eagle3Drafter:
        """The drafter with whole weights on the CPU. Every process must ask; the first may use."""
        self.release()
        state = {name: full(tensor).cpu() for name, tensor in self.drafter.state_dict().items()}
        with torch.device("meta"):
            made = Eagle3Drafter(self.drafter.spec)
        made.load_state_dict(state, assign=True)
        made.reset_rope()
        made.owns_embeddings = self.drafter.owns_embeddings
        made.owns_lm_head = self.drafter.owns_lm_head
        return made.eval()


def _no_buffers() -> dict[str, Any]:
    """Tables never change: they need no broadcast, under whichever name torch has for it."""
    known = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return {name: False}


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor of which each process may hold a shard."""
    tensor = tensor.detach()
    whole = getattr(tensor, "full_tensor", None)
    return whole() if whole is not None else tensor


def like(whole: Tensor, parameter: Tensor) -> Tensor:
    """`whole` laid out over the processes as `parameter` is."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return whole.to(parameter.device)
    from torch.distributed.tensor import distribute_tensor

    placements = parameter.placements  # type: ignore[attr-defined]
    return distribute_tensor(whole.to(parameter.device), mesh, placements)
