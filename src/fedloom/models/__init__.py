"""Networks of the papers and the usual ones of the field, one file a family; `resolve.build` makes them by name."""
