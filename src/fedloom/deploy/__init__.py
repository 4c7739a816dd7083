"""Real devices: the same methods over Flower (a server and its clients) and over gRPC (peers without a server)."""
