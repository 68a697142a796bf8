"""A discrete-event simulation of a training on a fleet of cells, driving the same `cells.plan` as the manager."""
