"""Faults in a real cluster under load: pretend Ray nodes on this machine, real processes, gRPC, signals and HTTP."""
