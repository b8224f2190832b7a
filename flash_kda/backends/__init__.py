"""One module or package per backend, each with ``supports(problem)`` and ``run(inputs)``; see dispatch.Backend."""
