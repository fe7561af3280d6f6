"""Models. A new dense family is a file here that says what differs, and an entry below."""

from workers.models import llama, mistral, qwen2, qwen3
from workers.models.config import Family

FAMILIES: dict[str, Family] = {
    family.name: family for family in (llama.FAMILY, mistral.FAMILY, qwen2.FAMILY, qwen3.FAMILY)
}
