"""One file a method, read beside its paper."""
