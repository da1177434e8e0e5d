"""Every installed part passes the suite of its seam: one test class a part, made from the registry."""

from core.registry import Registry
from core.testing import conformance

for _found in Registry().all:
    _suite = conformance(_found.seam, _found.name)
    globals()[_suite.__name__] = _suite
del _found, _suite
