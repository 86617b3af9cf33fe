"""langgraph: a graph of a model and its tools, streamed by tokens, with a memory of several turns."""

from typing import Any, Literal

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage  # type: ignore[import-not-found]
from langchain_core.tools import tool  # type: ignore[import-not-found]
from langchain_openai import ChatOpenAI  # type: ignore[import-not-found]
from langgraph.checkpoint.memory import InMemorySaver  # type: ignore[import-not-found]
from langgraph.graph import START, MessagesState, StateGraph  # type: ignore[import-not-found]
from langgraph.prebuilt import ToolNode, tools_condition  # type: ignore[import-not-found]

from ..checks import Service, main

_QUESTION = "What is the weather in Rome?"


@tool  # type: ignore[untyped-decorator]
def weather(city: Literal["Paris", "Rome"]) -> str:
    """Tells the weather of a city."""
    return f"sunny in {city}"


def graph_of(service: Service, **options: Any) -> Any:
    """The loop of an agent: the first answer must call the tool, the one after its result must not."""
    place = {"base_url": service.base_url, "api_key": service.key, "max_retries": 0}
    model = ChatOpenAI(model=service.model, max_tokens=60, temperature=0, **place)
    calling, talking = (model.bind_tools([weather], tool_choice=choice) for choice in ("weather", "none"))

    def answer(state: Any) -> Any:
        has_result = isinstance(state["messages"][-1], ToolMessage)
        return {"messages": [(talking if has_result else calling).invoke(state["messages"])]}

    builder = StateGraph(MessagesState)
    builder.add_node("answer", answer)
    builder.add_node("tools", ToolNode([weather]))
    builder.add_edge(START, "answer")
    builder.add_conditional_edges("answer", tools_condition)
    builder.add_edge("tools", "answer")
    return builder.compile(**options)


def loop(service: Service) -> str:
    messages = graph_of(service).invoke({"messages": [HumanMessage(_QUESTION)]})["messages"]
    _, call, result, last = messages
    assert call.tool_calls[0]["args"]["city"] in ("Paris", "Rome")
    assert result.content == f"sunny in {call.tool_calls[0]['args']['city']}"
    assert isinstance(last, AIMessage)
    assert last.content
    return f"{call.tool_calls[0]['args']}, then {last.content[:40]!r}"


def streamed_by_tokens(service: Service) -> str:
    asked = {"messages": [HumanMessage(_QUESTION)]}
    whole = graph_of(service).invoke(asked)["messages"][-1].content
    parts = [
        part.content
        for part, where in graph_of(service).stream(asked, stream_mode="messages")
        if where["langgraph_node"] == "answer" and part.content
    ]
    assert len(parts) > 1
    assert "".join(parts) == whole
    return f"{len(parts)} parts"


def turns(service: Service) -> str:
    graph, thread = graph_of(service, checkpointer=InMemorySaver()), {"configurable": {"thread_id": "one"}}
    graph.invoke({"messages": [HumanMessage(_QUESTION)]}, thread)
    messages = graph.invoke({"messages": [HumanMessage("And in Paris?")]}, thread)["messages"]
    first, second = (message for message in messages if isinstance(message, AIMessage) and not message.tool_calls)
    assert second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]
    return f"{len(messages)} messages, {second.usage_metadata['input_tokens']} tokens asked in the end"


if __name__ == "__main__":
    main(loop, streamed_by_tokens, turns)
