"""Sub-models: cuts, what shares and objectives do to them, and the methods that choose them."""
