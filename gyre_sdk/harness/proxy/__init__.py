"""The recording proxy between agents and replicas: sockets above (`server`, `upstream`), protocol below."""
