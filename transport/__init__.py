"""Messages between router and workers over gRPC: encoding, multiplexing, heartbeats, loss.

Knows sessions only as numbers on messages. Both services and the router use it; it is the one reader of ``protos``.
"""
