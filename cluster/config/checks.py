"""What can be found wrong before anything is started: models, ports, certificates, exposure.

Cheap on purpose: reads a few small files, imports neither torch nor ray. What only loading can show is left to the
workers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from cluster.config.config import Config
from cluster.config.environment import COMMIT, expanded, is_folder, pinned
from cluster.config.pools import AT_DRAFTER, LOADED, MTP, DraftConfig, Pool, TargetConfig
from cluster.config.security import check_http_exposure, check_security, check_worker_exposure
from cluster.config.serving import difference
from cluster.config.settings import AUTO
from cluster.config.settings import CheckError as CheckError
from engine.settings import misplaced
from speculation.events import Role
from transport.address import check_free, join, parse

ROLES = ("router", "target", "draft")


def check(config: Config) -> None:
    """All that ``paceline up`` can know beforehand. Raises :class:`CheckError`, SecurityError, AddressError."""
    check_bounds(config)
    check_heads(config)
    if config.backend == "local" and config.router.replicas not in (AUTO, 1):
        raise CheckError(f"router.replicas is {config.router.replicas}, but the local backend runs one router")
    check_http_exposure(config)
    check_security(config, ROLES if config.on_this_machine else ())
    if config.on_this_machine:  # in a cluster it may be our own, to be updated
        check_free(join(config.router.host, config.router.port))
    for pool in config.nonempty_pools():
        named = {name: f"{pool.path}.{name}" for name in LOADED} | {"shared": "--draft", "model": _named(pool)}
        check_loaded(pool.settings, config.shared_draft(pool), named)
    check_ranks(config)
    for pool in config.pools():
        if pool.role is Role.TARGET:
            flag = "router.tokenizer" if config.router.tokenizer else _named(pool)
            instead = "set router.tokenizer to a folder that has one"
            check_tokenizer(config.router.tokenizer or pool.settings.model, flag, instead)


def _named(pool: Pool) -> str:
    """What names the model of a pool: the flag, where there is one."""
    return f"{pool.path}.model" if pool.model else f"--{pool.path}"


def check_loaded(settings: TargetConfig | DraftConfig, shared: DraftConfig | None, named: Mapping[str, str]) -> None:
    """Whether a worker can load what its settings name, and the draft model that it has in its process, if any.

    ``named``: what messages call each of :data:`cluster.config.pools.LOADED`, and that draft model (``shared``).
    Raises :class:`CheckError`.
    """
    check_model(settings.model, named["model"])
    if settings.eagle != MTP or isinstance(settings, DraftConfig):  # a target may have a layer of its own
        check_head(settings.eagle, named["eagle"])
    if shared:
        check_model(shared.model, named["shared"])
        if detail := difference(settings.model, shared.model):
            raise CheckError(
                f"{named['shared']} {shared.model}: its vocabulary is not that of the target {settings.model} "
                f"({detail}), so it cannot draft in the target's process; choose a model with the target's tokenizer, "
                "or set draft.placement to own"
            )
    if not isinstance(settings, DraftConfig):
        return
    if settings.assistant:
        check_model(settings.assistant, named["assistant"])
        if detail := difference(settings.model, settings.assistant):
            raise CheckError(
                f"{named['assistant']} {settings.assistant}: its vocabulary is not that of the draft model "
                f"{settings.model} ({detail}); choose a model with the draft model's tokenizer"
            )
    if settings.target_tokenizer:
        instead = "give the target's model folder, or one with its tokenizer"
        check_tokenizer(settings.target_tokenizer, named["target_tokenizer"], instead)


def check_bounds(config: Config) -> None:
    """Whether numbers of replicas can follow the load as they shall. Raises :class:`CheckError`."""
    for path, pool in [("router", config.router), *((pool.path, pool.settings) for pool in config.pools())]:
        if not pool.max_replicas:
            continue
        if config.backend != "ray":
            raise CheckError(
                f"{path}.max_replicas is {pool.max_replicas}, but without Ray numbers of replicas do not follow the "
                f"load; set {path}.replicas"
            )
        if isinstance(pool, TargetConfig) and pool.standby:
            raise CheckError(
                f"{path}.standby is {pool.standby}, which needs a fixed number of replicas; "
                f"leave out {path}.max_replicas"
            )
        if pool.min_replicas > pool.max_replicas:
            raise CheckError(
                f"{path}.min_replicas is {pool.min_replicas}, which is more than its max_replicas, {pool.max_replicas}"
            )


def check_heads(config: Config) -> None:
    """Whether a head that is to draft away from its target has somebody to draft with it. Raises :class:`CheckError`.

    Nobody has to where requests get no drafts unless they ask.
    """
    drafted = {pool.model for pool in config.nonempty_pools() if pool.role is Role.DRAFT}
    for pool in config.pools():
        head = isinstance(pool.settings, TargetConfig) and pool.settings.eagle and pool.settings.eagle_at == AT_DRAFTER
        if not (head and config.speculation.enabled) or pool.model in drafted:
            continue
        wanted = config.speculation.drafters
        why = "there are no draft workers" if wanted else "speculation.drafters is false, as method eagle3 has it"
        instead = "have some" if wanted else "name the head by --draft-eagle"
        raise CheckError(
            f"{pool.path}.eagle_at is drafter, but {why}, so nobody would draft with the head; {instead}, or set it "
            "to target"
        )


def check_ranks(config: Config) -> None:
    """Whether Ray can reserve what each rank asks for. Raises :class:`CheckError`."""
    if config.backend != "ray":
        return
    for pool in config.pools():
        ranks, gpus = pool.settings.tensor_parallel_size, pool.settings.gpus
        if ranks > 1 and gpus != int(gpus):
            raise CheckError(
                f"{pool.path}.gpus is {gpus:g}, but with tensor_parallel_size {ranks} every rank needs a GPU of its "
                "own; give 1, or 0 on a CPU"
            )
        if ranks > 1 and not gpus and not config.ray.cpus_per_worker:
            raise CheckError(
                f"{pool.path}.tensor_parallel_size is {ranks}, but its ranks reserve nothing in Ray, which then cannot "
                f"keep them together; set {pool.path}.gpus or ray.cpus_per_worker above 0"
            )


def check_listen(address: str, config: Config) -> None:
    """Whether a worker may and can listen there. Raises SecurityError, AddressError."""
    check_worker_exposure(parse(address)[0], config)
    check_free(address)


def check_model(model: str, flag: str) -> None:
    """Whether this is a model folder, or may be a hub id. The loader has the last word."""
    if not os.path.exists(expanded(model)):
        check_pin(model, flag)
    if why := misplaced(model):
        raise CheckError(f"{flag} {model}: {why}")


def check_pin(model: str, flag: str) -> None:
    """Whether the commit of HUB-ID@COMMIT is one, and here: where it is, its folder stands in the settings instead."""
    if (pin := pinned(model)) is None:
        return
    name, commit = pin
    if not re.fullmatch(COMMIT, commit):
        raise CheckError(f"{flag} {model}: {commit!r} is no commit; give its 40 digits, as the hub lists under History")
    raise CheckError(
        f"{flag} {model}: the hub's cache here has no such commit; fetch it: `hf download {name} --revision {commit}`"
    )


def check_head(folder: str, flag: str) -> None:
    """Whether this is a folder of an EAGLE-3 head, if one is given. The loader has the last word."""
    if folder and not os.path.isfile(expanded(folder) / "config.json"):
        raise CheckError(f"{flag} {folder}: not a folder of an EAGLE-3 head, there is no config.json in it")


def check_tokenizer(model: str, flag: str = "--tokenizer", instead: str = "give a folder that has one") -> None:
    """Whether this is a folder with a tokenizer, or may be a hub id; ``instead``: what to do where it has none."""
    folder = expanded(model)
    if not is_folder(folder):
        check_model(model, flag)
    elif not (folder / "tokenizer.json").is_file():
        raise CheckError(f"{flag} {model}: has no tokenizer.json; {instead}")
