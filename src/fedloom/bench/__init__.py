"""Speed, measured on the machine at hand: `fedloom bench NAME`. Ratios from one run; machines are noisy."""
