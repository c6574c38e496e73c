"""A retriever of LangChain over a bank: passages with their places, for any chain."""

import sys

from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever

from sedem import MemoryBank, SeDeM


class BankRetriever(BaseRetriever):
    """Finds `k` passages; `metadata` says where each stands."""

    model: SeDeM
    bank: MemoryBank
    k: int = 4

    def _get_relevant_documents(self, query: str, **_: object) -> list[Document]:
        found = self.model.search(self.bank, query, k=self.k)
        keys = ("document", "start", "end", "page", "score")
        return [Document(c.text, metadata={key: getattr(c, key) for key in keys}) for c in found]


if __name__ == "__main__":
    model, bank = SeDeM.from_pretrained("sedem-smol"), MemoryBank.open(sys.argv[1])
    for document in BankRetriever(model=model, bank=bank).invoke(sys.argv[2]):
        print(document.metadata, document.page_content[:60])
