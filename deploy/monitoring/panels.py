"""What the Grafana dashboard shows: :data:`ROWS` of graphs, each with the queries behind it.

Two kinds of series are read differently (see :mod:`router.telemetry.metrics`): what a router did is added up over
routers, what a worker says of itself is the same from every router, so the maximum is taken first.
"""

from __future__ import annotations

from dataclasses import dataclass

MODEL = '{model=~"$model"}'
EVERY = "[$__rate_interval]"


def per_second(name: str, by: str = "model", match: str = MODEL) -> str:
    """The rate of what routers count."""
    return f"sum by ({by}) (rate({name}{match}{EVERY}))"


def of_workers(name: str, match: str = "", by: str = "role, worker") -> str:
    """The rate of what workers count."""
    return f"max by ({by}) (rate({name}{match}{EVERY}))"


def quantile(q: float, name: str) -> str:
    """A quantile of a histogram of routers."""
    return f"histogram_quantile({q}, sum by (model, le) (rate({name}_bucket{MODEL}{EVERY})))"


def quantiles(name: str) -> tuple[tuple[str, str], ...]:
    """Median, 95th and 99th percentile."""
    return tuple((f"{{{{model}}}} p{q * 100:.0f}", quantile(q, name)) for q in (0.5, 0.95, 0.99))


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph: what it shows, in which unit of Grafana's, from which queries (legend, expression)."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    about: str = ""
    stacked: bool = False


_DRAFTS = per_second("paceline_spec_decode_num_drafts_total")
_OFFERED = per_second("paceline_spec_decode_num_draft_tokens_total")
_ACCEPTED = per_second("paceline_spec_decode_num_accepted_tokens_total")
_STEPPING = of_workers("paceline_worker_step_seconds_total", '{role="target"}')
_WAITING = of_workers("paceline_draft_wait_seconds_total", '{role="target"}')
_HITS = of_workers("paceline_prefix_cache_hits_total")
_QUERIES = of_workers("paceline_prefix_cache_queries_total")

ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Traffic and latency",
        (
            Panel(
                "Requests",
                "reqps",
                (
                    (
                        "{{model}} {{finished_reason}}",
                        per_second("paceline_request_success_total", "model, finished_reason"),
                    ),
                    ("failed: {{code}}", per_second("paceline_request_failure_total", "code", "") + " > 0"),
                ),
                "Choices that ended, by reason (abort: the client went), and requests that failed.",
                stacked=True,
            ),
            Panel(
                "Tokens",
                "short",
                (
                    ("{{model}} generated", per_second("paceline_generation_tokens_total")),
                    ("{{model}} of prompts", per_second("paceline_prompt_tokens_total")),
                ),
                "Tokens a second.",
            ),
            Panel("Time to first token", "s", quantiles("paceline_time_to_first_token_seconds")),
            Panel(
                "Time per token",
                "s",
                quantiles("paceline_inter_token_latency_seconds"),
                "Time between commits divided among their tokens.",
            ),
            Panel(
                "Silence between commits",
                "s",
                quantiles("paceline_commit_interval_seconds"),
                "What a reader of a stream sees: one commit brings several tokens at once.",
            ),
            Panel("Whole request", "s", quantiles("paceline_e2e_request_latency_seconds")),
        ),
    ),
    (
        "Speculation",
        (
            Panel(
                "Acceptance",
                "percentunit",
                (("{{model}}", f"{_ACCEPTED} / {_OFFERED}"),),
                "Accepted of verified draft tokens. Of a tree at most one path can be accepted.",
            ),
            Panel(
                "Acceptance by position",
                "percentunit",
                (
                    (
                        "{{model}} {{position}}",
                        per_second("paceline_spec_decode_num_accepted_tokens_per_pos_total", "model, position")
                        + f" / on (model) group_left {_DRAFTS}",
                    ),
                ),
                "How often the draft token at each place was accepted, of all verifications with drafts.",
            ),
            Panel(
                "Tokens per verification",
                "short",
                (("{{model}}", f"1 + {_ACCEPTED} / {_DRAFTS}"),),
                "Mean acceptance length, over verifications with drafts; 1 is plain decoding.",
            ),
            Panel(
                "Pipeline efficiency",
                "percentunit",
                (("{{worker}}", f"{_STEPPING} / ({_STEPPING} + {_WAITING})"),),
                "Part of a target's working time that it computed rather than waited for drafts.",
            ),
            Panel(
                "Waits for drafts",
                "s",
                (("{{worker}}", f"{_WAITING} / {of_workers('paceline_draft_waits_total')}"),),
                "Mean time that a step was put off because drafts were expected.",
            ),
            Panel(
                "Wanted lead",
                "short",
                (
                    (
                        "{{model}}",
                        per_second("paceline_draft_lead_tokens_sum")
                        + f" / {per_second('paceline_draft_lead_tokens_count')}",
                    ),
                ),
                "How far ahead targets want drafters to run, in tokens; near 0 speculation does not pay.",
            ),
            Panel(
                "Proposals by fate",
                "short",
                (
                    (
                        "{{fate}}",
                        f"sum by (fate) ({of_workers('paceline_proposals_total', by='worker, fate')})",
                    ),
                ),
                "Only placed ones are of use; stale ones came too late.",
                stacked=True,
            ),
            Panel(
                "Draft tokens by source",
                "short",
                (
                    (
                        "{{source}} verified",
                        f"sum by (source) ({of_workers('paceline_worker_offered_tokens_total', by='worker, source')})",
                    ),
                    (
                        "{{source}} accepted",
                        f"sum by (source) ({of_workers('paceline_worker_accepted_tokens_total', by='worker, source')})",
                    ),
                ),
            ),
            Panel(
                "Acceptance by pair of workers",
                "percentunit",
                (("{{draft}} at {{target}}", "avg by (target, draft) (paceline_acceptance_ratio)"),),
                "Over the last 2000 or so draft tokens offered for each pair.",
            ),
        ),
    ),
    (
        "Workers and cache",
        (
            Panel(
                "Workers",
                "short",
                (("{{role}} {{state}}", "max by (role, state) (paceline_workers)"),),
                "As the router sees them that sees most.",
            ),
            Panel(
                "Sessions at workers",
                "short",
                (
                    ("{{worker}} running", "max by (role, worker) (paceline_num_requests_running)"),
                    ("{{worker}} waiting", "max by (role, worker) (paceline_num_requests_waiting) > 0"),
                ),
            ),
            Panel(
                "Cache in use",
                "percentunit",
                (("{{worker}}", "max by (role, worker) (paceline_kv_cache_usage_perc)"),),
            ),
            Panel(
                "Prefix cache hits",
                "percentunit",
                (("{{worker}}", f"{_HITS} / {_QUERIES}"),),
                "Part of the tokens of prompts that the target's cache held.",
            ),
            Panel("Preemptions", "short", (("{{worker}}", of_workers("paceline_num_preemptions_total")),)),
            Panel(
                "Time of a step",
                "s",
                (
                    (
                        "{{worker}}",
                        of_workers("paceline_worker_step_seconds_total")
                        + f" / {of_workers('paceline_worker_steps_total')}",
                    ),
                ),
            ),
            Panel(
                "Round trip to workers",
                "s",
                (("{{worker}}", "max by (role, worker) (paceline_worker_round_trip_seconds)"),),
            ),
            Panel(
                "Traffic with workers",
                "Bps",
                (("{{role}} {{direction}}", per_second("paceline_worker_bytes_total", "role, direction", "")),),
            ),
        ),
    ),
    (
        "Failures and failovers",
        (
            Panel(
                "Failovers",
                "short",
                (("sessions re-opened", f"sum(increase(paceline_failovers_total{EVERY}))"),),
                "Sessions that went on at another target worker. Their clients saw a pause, no fault.",
            ),
            Panel(
                "Requests failed",
                "reqps",
                (("{{code}}", per_second("paceline_request_failure_total", "code", "")),),
            ),
            Panel(
                "Requests refused",
                "reqps",
                (("{{code}}", per_second("paceline_requests_refused_total", "code", "") + " > 0"),),
                "Before anything was started; overloaded: a 429.",
            ),
            Panel(
                "Messages that break the protocol",
                "short",
                (
                    ("malformed", f"sum(increase(paceline_malformed_messages_total{EVERY}))"),
                    ("held against a drafter", f"sum(increase(paceline_draft_strikes_total{EVERY}))"),
                    ("drafters quarantined", f"sum(increase(paceline_drafters_quarantined_total{EVERY}))"),
                ),
            ),
            Panel(
                "Late messages",
                "short",
                (("to routers", f"sum(rate(paceline_stale_messages_total{EVERY}))"),),
                "Harmless; many of them mean that sessions move a lot.",
            ),
            Panel(
                "Acceptance collapsed",
                "short",
                (
                    ("{{draft}} at {{target}}", "max by (target, draft) (paceline_acceptance_collapsed) > 0"),
                    ("episodes", f"sum(increase(paceline_acceptance_collapses_total{EVERY}))"),
                ),
            ),
            Panel(
                "Certificates end in",
                "s",
                (("{{file}}", "min by (file) (paceline_certificate_expiry_timestamp_seconds) - time()"),),
            ),
        ),
    ),
    (
        "Autoscaling",
        (
            Panel(
                "Demand on targets",
                "short",
                (
                    ("running", 'sum(max by (worker) (paceline_num_requests_running{role="target"}))'),
                    ("waiting", 'sum(max by (worker) (paceline_num_requests_waiting{role="target"}))'),
                    ("waiting for a target", 'sum(paceline_router_sessions{state="placing"})'),
                ),
                "Sessions; what the policies of the target pools follow.",
                stacked=True,
            ),
            Panel(
                "Replicas of pools",
                "short",
                (("{{pool}} {{state}}", "max by (pool, state) (paceline_autoscaling_replicas)"),),
                "What was decided last, and what runs. From Ray Serve's controller: only in a cluster.",
            ),
            Panel(
                "Why",
                "short",
                (
                    (
                        "{{pool}}: {{why}}, held by {{held}}",
                        "max by (pool, why, held) (paceline_autoscaling_decision_info) > 0",
                    ),
                ),
                "What decided the number of replicas last, and what kept it from the number wanted.",
            ),
            Panel(
                "Workers up",
                "short",
                (("{{role}}", 'max by (role) (paceline_workers{state="up"})'),),
            ),
            Panel(
                "Drafters: wanted and delivered",
                "short",
                (
                    ("wanted: lead a second", f"sum(rate(paceline_draft_lead_tokens_sum{EVERY}))"),
                    ("drafted", f"sum({of_workers('paceline_drafter_proposed_tokens_total', by='worker')})"),
                    ("verified", f"sum(rate(paceline_spec_decode_num_draft_tokens_total{EVERY}))"),
                ),
                "Tokens a second.",
            ),
        ),
    ),
)
