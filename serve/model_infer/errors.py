"""Errors of a worker that are its own."""


class PlanError(Exception):
    """A plan is stale, out of order, or contradicts the batch.

    The ranks and the router no longer agree on what is in the batch, so the worker must end: a rank that skipped the
    plan would leave its peers waiting in a collective, or worse, go on with other pages than they have.
    """
