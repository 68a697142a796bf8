"""One batch on several cells: units are leased, gradients are summed, one process commits them. See `book` for the rules."""
