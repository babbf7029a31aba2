"""Measurements. Every figure is a ratio of things measured side by side in one run, and says what it ran on.

``speculation`` designs the settings and runs them; ``contenders`` says who takes part, ``measure`` how they take turns
and what a run is, ``records`` what the workers' step records mean, ``figures`` turns both into rows and ratios,
``report`` and ``plots`` show them. ``workers`` and ``baseline`` start the processes, ``pair`` builds the models.

``engine`` measures the target worker's engine alone, with modules of its own: ``engine_settings`` is the design,
``engine_model`` the model, ``engine_steps``, ``engine_loop``, ``engine_stock``, ``engine_memory`` and ``bandwidth``
measure, ``engine_figures`` and ``engine_report`` turn that into figures and show them.
"""

import engine as _engine  # noqa: F401 - first of all: it quiets what transformers imports
