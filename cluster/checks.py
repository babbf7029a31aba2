"""What can be found wrong before anything is started: models, vocabularies, ports, certificates, exposure.

Cheap on purpose: reads a few small files, imports neither torch nor ray. What only loading can show is left to the
workers.
"""

from __future__ import annotations

from pathlib import Path

from cluster.config import Config, Pool, most
from cluster.security import check_http_exposure, check_security, check_worker_exposure
from speculation.events import Role
from transport.address import check_free, join, parse

ROLES = ("router", "target", "draft")


class CheckError(Exception):
    """Something that would fail later. One line that says what would be right."""


def check(config: Config) -> None:
    """All that ``paceline up`` can know beforehand. Raises :class:`CheckError`, SecurityError, AddressError."""
    check_bounds(config)
    if config.backend == "local" and config.router.replicas > 1:
        raise CheckError(f"router.replicas is {config.router.replicas}, but the local backend runs one router")
    check_http_exposure(config)
    here = config.backend == "local" or config.ray.address == "local"
    check_security(config, ROLES if here else ())
    if here:  # in a cluster it may be our own, to be updated
        check_free(join(config.router.host, config.router.port))
    pools = config.pools()
    for pool in pools:
        if most(pool.settings) or pool.role is Role.TARGET:
            check_model(pool.settings.model, _setting_of(pool))
    check_ranks(config)
    for model in config.models or [""]:
        target, *drafts = (pool for pool in pools if pool.model == model)
        for draft in drafts:
            if most(draft.settings):
                check_vocabularies(target.settings.model, draft.settings.model)
        check_tokenizer(config.router.tokenizer or target.settings.model)


def _setting_of(pool: Pool) -> str:
    """How the user gave its model."""
    return f"{pool.path}.model" if pool.model else f"--{pool.path}"


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
        if pool.min_replicas > pool.max_replicas:
            raise CheckError(
                f"{path}.min_replicas is {pool.min_replicas}, which is more than its max_replicas, {pool.max_replicas}"
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
    folder = Path(model).expanduser()
    try:
        is_folder, has_config, exists = folder.is_dir(), (folder / "config.json").is_file(), folder.exists()
    except OSError as error:
        raise CheckError(f"{flag} {model}: cannot be read: {error.strerror}") from error
    if is_folder:
        if not has_config:
            raise CheckError(f"{flag} {model}: not a model folder, it has no config.json")
        return
    if exists:
        raise CheckError(f"{flag} {model}: is a file; give the folder that holds config.json and the weights")
    parts = model.split("/")
    if len(parts) != 2 or not all(parts) or model[0] in "./~" or Path(parts[0]).is_dir():
        raise CheckError(f"{flag} {model}: no such folder; give a model folder or a hub id such as Org/Name")


def check_tokenizer(model: str) -> None:
    """Whether a model folder has the tokenizer that the router needs."""
    folder = Path(model).expanduser()
    if folder.is_dir() and not (folder / "tokenizer.json").is_file():
        raise CheckError(f"{model}: has no tokenizer.json; give a folder that has with --tokenizer")


def check_vocabularies(target: str, draft: str) -> None:
    """Target and draft must number the same tokens the same way. Padding of the embeddings does not matter.

    Hub ids are not looked at: the router compares what the loaded workers report.
    """
    ours, theirs = _vocabulary(target), _vocabulary(draft)
    if ours is None or theirs is None or ours == theirs:
        return
    different = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    detail = f"{len(ours)} and {len(theirs)} tokens, {len(different)} of them different, first {different[0]}"
    raise CheckError(
        f"target {target} and draft {draft} have different vocabularies ({detail}); "
        "choose a draft model with the target's tokenizer, or add --no-speculation"
    )


def _vocabulary(model: str) -> dict[int, str] | None:
    """Token id to token, or None where there is no tokenizer.json to tell."""
    path = Path(model).expanduser() / "tokenizer.json"
    if not path.is_file():
        return None
    import tokenizers  # 0.1 s that `paceline --help` need not spend

    try:
        known = tokenizers.Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckError(f"{path}: cannot read the tokenizer: {' '.join(str(error).split())}") from error
    return {number: token for token, number in known.items()}
