"""Where longspan meets other libraries; the only folder that imports them.

Whatever is imported from here first looks, once per process, whether torch and transformers are versions that longspan
knows, before a name that others lack is missed.
"""

from longspan.versions import check_versions

check_versions()
