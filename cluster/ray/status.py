"""What Ray Serve says of its applications, read as its controller sends it.

``serve.status()`` first makes models of all of it and checks them, for 45 ms of CPU each time: a start asks some fifty
times while workers load on the same cores, and whoever watches asks for ever. This takes 1 ms.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import Any


@dataclass(frozen=True, slots=True)
class DeploymentStatus:
    """One deployment of an application."""

    status: str
    """``HEALTHY``, ``UPDATING`` and so on."""
    message: str
    replica_states: Counter[str]
    """How many replicas are ``RUNNING``, ``STOPPING`` and so on."""


@dataclass(frozen=True, slots=True)
class ApplicationStatus:
    """One application."""

    status: str
    """``RUNNING``, ``DEPLOYING``, ``DEPLOY_FAILED`` and so on."""
    message: str
    deployments: dict[str, DeploymentStatus]


def applications() -> dict[str, ApplicationStatus]:
    """How all of them do, by name; none where Serve does not run. Raises :class:`ray.exceptions.RayError`."""
    return {name: _application(details) for name, details in application_details().items()}


def application_details() -> dict[str, Any]:
    """All that is said of them, by name; none where Serve does not run. Raises :class:`ray.exceptions.RayError`."""
    from ray.serve.context import _get_global_client

    client: Any = _get_global_client(raise_if_no_controller_running=False)
    return client.get_serve_details()["applications"] if client else {}


def _application(details: dict[str, Any]) -> ApplicationStatus:
    deployments = {
        name: DeploymentStatus(
            _name(entry["status"]), entry["message"], Counter(_name(replica["state"]) for replica in entry["replicas"])
        )
        for name, entry in details["deployments"].items()
    }
    return ApplicationStatus(_name(details["status"]), details["message"], deployments)


def _name(state: str) -> str:
    """Of a state, which may come as a member of an enumeration."""
    return str(state.value) if isinstance(state, Enum) else state
