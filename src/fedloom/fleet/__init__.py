"""The clients as columns, and what a method may ask of them."""
