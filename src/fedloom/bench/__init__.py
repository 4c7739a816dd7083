"""Speed, measured on the machine at hand: `fedloom bench NAME`. Ratios from one run; machines are noisy.

Every bench is a module with a function of its name; what it takes are the command's options. It gives rows of plain
numbers, which the command shows as a table or as JSON, together with the machine they were measured on.
"""
