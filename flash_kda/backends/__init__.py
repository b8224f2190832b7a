"""One module or package per backend: ``supports``, ``run`` and ``run_decode``; see dispatch.Backend."""
