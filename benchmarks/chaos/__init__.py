"""Faults in a real cluster under load: pretend Ray nodes on this machine, real processes, gRPC, signals and HTTP.

``records`` says what counts against the server and what a row of the table is, ``workload`` asks for streams, ``nodes``
is the Ray cluster, ``stage`` holds it together with a running Paceline, ``faults`` are what can be done to it,
``scenarios`` the rows of the table, ``soak`` random faults for minutes, ``run`` plays and shows them.
"""
