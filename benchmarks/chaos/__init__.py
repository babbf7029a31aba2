"""Faults in a real cluster under load: pretend Ray nodes on this machine, real processes, gRPC, signals and HTTP.

``workload`` asks for streams and says what counts against the server, ``nodes`` is the Ray cluster, ``stage`` holds it
together with a running Paceline, ``processes`` sees what runs there, ``faults`` are what can be done to it,
``scenarios`` and ``routers`` the rows of the table, ``run`` plays them, or random faults for minutes, and shows them.
"""
