"""The life of a rank other than 0: load a part of the model, then compute what rank 0 says until it says no more."""

from __future__ import annotations

from engine.build import cache_for, load_model, recorder_for
from engine.forward import ForwardPass, StepInput
from engine.loading.loader import choose_device
from engine.parallel.group import Group, RankTask, joined_key, rendezvous


def serve_rank(task: RankTask) -> None:
    """Be this rank until rank 0 ends the group.

    Raises :class:`engine.model.ModelError` for what the model is to blame for, and torch's errors if a rank was lost.
    """
    settings = task.settings
    store = rendezvous(settings.tensor_parallel_size, task.port)
    store.set(joined_key(task.rank), "")
    device = choose_device(settings.device)
    group = Group(task.rank, settings.tensor_parallel_size, store, device, settings.load_timeout)
    model = load_model(settings, group=group)
    forward = ForwardPass(model, cache_for(settings, model, group).store, recorder_for(model), agreed=group.all_agree)
    group.meet()
    forward.warm_up()
    while message := group.hear():
        forward.compute(StepInput.decoded(message))
    group.leave()
