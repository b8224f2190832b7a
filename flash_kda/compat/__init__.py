"""The interfaces of other KDA libraries and of engines, mapped onto this one.

``flashkda`` is FlashKDA's own, ``fla`` FLA's; ``vllm``, ``sglang`` and ``transformers`` are those engines'.
"""
