"""A retriever of LlamaIndex over a bank: passages with their places, for any query engine."""

import sys

from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from sedem import MemoryBank, SeDeM


class BankRetriever(BaseRetriever):
    """Finds `k` passages; `metadata` says where each stands."""

    def __init__(self, model: SeDeM, bank: MemoryBank, k: int = 4) -> None:
        self.model, self.bank, self.k = model, bank, k
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        found = self.model.search(self.bank, query_bundle.query_str, k=self.k)
        keys = ("document", "start", "end", "page")
        facts = [{key: getattr(c, key) for key in keys} for c in found]
        nodes = [TextNode(text=c.text, metadata=m) for c, m in zip(found, facts, strict=True)]
        return [NodeWithScore(node=n, score=c.score) for n, c in zip(nodes, found, strict=True)]


if __name__ == "__main__":
    model, bank = SeDeM.from_pretrained("sedem-smol"), MemoryBank.open(sys.argv[1])
    for hit in BankRetriever(model, bank).retrieve(sys.argv[2]):
        print(hit.node.metadata, hit.node.get_content()[:60])
