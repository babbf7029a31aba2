"""The cost of the HTTP path: streams whose tokens come at a fixed pace, beside a bare server that streams."""
