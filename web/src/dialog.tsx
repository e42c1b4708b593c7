import type { ComponentChildren, JSX } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";

interface Props {
  title: string;
  onClose: () => void;
  children: ComponentChildren;
  class?: string;
}

/** A modal dialog, the browser's own: it keeps the focus, and Escape closes it. */
export function Dialog({ title, onClose, children, ...rest }: Props): JSX.Element {
  const element = useRef<HTMLDialogElement>(null);
  useLayoutEffect(() => {
    element.current!.showModal();
  }, []);
  return (
    <dialog
      ref={element}
      class={rest.class}
      aria-label={title}
      onClose={onClose}
      onClick={(event) => event.target === element.current && element.current?.close()}
    >
      <div class="sheet">
        <header>
          <h2>{title}</h2>
          <button class="plain" aria-label="Close" onClick={() => element.current?.close()}>
            ✕
          </button>
        </header>
        {children}
      </div>
    </dialog>
  );
}
